/* Signals that arrive while a thread sleeps in a call: whether the call goes on is a matter of the handler that has run, and of the call.
 * Usage: interrupts CASE [moved]
 *
 * SIGUSR1 has a handler with SA_RESTART, SIGUSR2 one without; in one case they fork. One thread makes the call; another one sees that it sleeps, sends it the
 * signal, and when that is handled and the thread sleeps again makes the connection ready. */

#include "debugger.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

static struct pair ends;
static int listener, epoll, file;
static char buffer[1 << 22];
static pthread_t sleeper;
static pid_t sleepers_id;
static atomic_int calling, handled, over;
static long result;
static int number;
static int stopper, stopped, full, may_move;
/* Children are made by _Fork, or by a system call alone. Afterwards the connection may stay in the kernel. */
static int bare;
#define RAW 2
/* A child that a handler has made, in which the same call returns; and the id of this process. */
static volatile pid_t made;
static pid_t parent;
/* Where the child says what it has seen. */
static int report, reported;

static void count(int signal)
{
    (void)signal;
    handled++;
}

static void count_with_information(int signal, siginfo_t *info, void *context)
{
    CHECK(info->si_signo == signal && context != NULL);
    handled++;
}

static void fork_and_count(int signal)
{
    (void)signal;
    made = bare == RAW ? syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : bare ? _Fork() : fork();
    if (made == 0)
        alarm(STANDS_STILL);
    handled++;
}

static void nothing(int signal)
{
    (void)signal;
}

static void handle(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    CHECK(sigaction(signal, &action, NULL) == 0);
}

/* rt_sigaction(2) by an instruction of the program's own. */
static void handle_unseen(int signal, void (*handler)(int), unsigned long flags)
{
    struct {
        void (*handler)(int);
        unsigned long flags;
        void *restorer;
        unsigned long mask;
    } action, old;
    long done;
    register long size __asm__("r10") = 8;
    /* The C library's way back from a handler is the one of an action that it has set. */
    __asm__ volatile("syscall" : "=a"(done) : "a"(SYS_rt_sigaction), "D"((long)signal), "S"(NULL), "d"(&old), "r"(size) : "rcx", "r11", "memory");
    CHECK(done == 0);
    action = old;
    action.handler = handler;
    action.flags = (old.flags & 0x04000000) | flags;
    __asm__ volatile("syscall" : "=a"(done) : "a"(SYS_rt_sigaction), "D"((long)signal), "S"(&action), "d"(NULL), "r"(size) : "rcx", "r11", "memory");
    CHECK(done == 0);
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* The calls. */
enum {
    READ, RECV, RECVMSG, PEEK, READV, WRITE, SEND, SENDMSG, SENDFILE, ACCEPT, TRANSFERS,
    POLL = TRANSFERS, PPOLL, SELECT, PSELECT, EPOLL_WAIT, EPOLL_PWAIT2, CALLS
};

static const char *const names[] = {"read", "recv", "recvmsg", "recv, only looking", "readv", "write", "send", "sendmsg", "sendfile", "accept",
                                    "poll", "ppoll", "select", "pselect", "epoll_wait", "epoll_pwait2"};

static int sends(int call)
{
    return call >= WRITE && call <= SENDFILE;
}

static long make(int call)
{
    static char got[100];
    struct iovec piece = {got, 3}, all = {buffer, sizeof buffer};
    struct msghdr in = {.msg_iov = &piece, .msg_iovlen = 1}, out = {.msg_iov = &all, .msg_iovlen = 1};
    struct pollfd entry = {.fd = ends.server, .events = POLLIN};
    struct timespec long_time = {.tv_sec = 1000};
    struct epoll_event event;
    fd_set set;
    off_t offset = 0;
    FD_ZERO(&set);
    FD_SET(ends.server, &set);
    switch (call) {
    case READ: return read(ends.server, got, 3);
    case RECV: return recv(ends.server, got, 3, 0);
    case RECVMSG: return recvmsg(ends.server, &in, 0);
    case PEEK: return recv(ends.server, got, 3, MSG_PEEK) == 3 ? recv(ends.server, got, 3, 0) : -1;
    case READV: return readv(ends.server, &piece, 1);
    case WRITE: return write(ends.server, buffer, sizeof buffer);
    case SEND: return send(ends.server, buffer, sizeof buffer, 0);
    case SENDMSG: return sendmsg(ends.server, &out, 0);
    case SENDFILE: return sendfile(ends.server, file, &offset, sizeof buffer);
    case ACCEPT: return accept(listener, NULL, NULL);
    case POLL: return poll(&entry, 1, -1);
    case PPOLL: return ppoll(&entry, 1, &long_time, NULL);
    case SELECT: return select(ends.server + 1, &set, NULL, NULL, NULL);
    case PSELECT: return pselect(ends.server + 1, &set, NULL, NULL, &long_time, NULL);
    case EPOLL_WAIT: return epoll_wait(epoll, &event, 1, -1);
    default: return syscall(SYS_gettid) > 0 ? epoll_pwait2(epoll, &event, 1, &long_time, NULL) : 0;
    }
}

static void *sleeps(void *argument)
{
    int call = *(int *)argument;
    sleepers_id = syscall(SYS_gettid);
    calling = 1;
    result = make(call);
    number = errno;
    if (getpid() != parent) {
        /* Its parent's call has gone on, or ended, in the same way. */
        int length = snprintf(buffer, sizeof buffer, "%ld %d", result < 0 || call != ACCEPT ? result : 0, result < 0 ? number : 0);
        _exit(write(report, buffer, length) == length ? 0 : 1);
    }
    over = 1;
    return NULL;
}

/* Waits until the thread sleeps in its call, or has returned. */
static void until_asleep(void)
{
    while (!calling)
        sched_yield();
    for (int seen = 0; seen < 3 && !over;)
        seen = state_of(parent, sleepers_id) == 'S' ? seen + 1 : 0, sched_yield();
}

static void begin(int *call)
{
    calling = handled = over = 0;
    CHECK(pthread_create(&sleeper, NULL, sleeps, call) == 0);
    until_asleep();
}

static void interrupt(int signal)
{
    int before = handled;
    CHECK(pthread_kill(sleeper, signal) == 0);
    while (handled == before && !over)
        sched_yield();
    until_asleep();
}

static void end(void)
{
    CHECK(pthread_join(sleeper, NULL) == 0);
}

/* Fills what the connection takes to the last byte, so that a call that sends sleeps. */
static void fill(void)
{
    struct pollfd entry = {.fd = ends.server, .events = POLLOUT};
    for (int quiet = full ? 10 : 0; quiet < 10; quiet++) {
        for (int piece = 60000; piece > 0; piece /= 10)
            while (send(ends.server, buffer, piece, MSG_DONTWAIT) > 0)
                quiet = 0;
        poll(&entry, 1, 50);
    }
    full = 1;
}

/* Receives until the call has ended, and what is left. */
static void drain(int call)
{
    full = full && !sends(call);
    while (sends(call) && (!over || poll(&(struct pollfd){.fd = ends.client, .events = POLLIN}, 1, 50) == 1))
        if (recv(ends.client, buffer, sizeof buffer, MSG_DONTWAIT) < 0)
            sched_yield();
}

static void make_ready(int call)
{
    if (call == ACCEPT) {
        struct sockaddr_in address;
        socklen_t length = sizeof address;
        int client = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(getsockname(listener, (void *)&address, &length) == 0 && connect(client, (void *)&address, length) == 0);
        close(client);
    } else if (!sends(call)) {
        CHECK(write(ends.client, "abc", 3) == 3);
    }
    drain(call);
}

static void limit(int seconds)
{
    struct timeval time = {.tv_sec = seconds};
    for (int option = SO_RCVTIMEO;; option = SO_SNDTIMEO) {
        CHECK(setsockopt(ends.server, SOL_SOCKET, option, &time, sizeof time) == 0);
        CHECK(setsockopt(listener, SOL_SOCKET, option, &time, sizeof time) == 0);
        if (option == SO_SNDTIMEO)
            return;
    }
}

static void wrong(const char *what, int call)
{
    char line[200];
    int length = snprintf(line, sizeof line, "%s, %s: %ld (%s)\n", names[call], what, result, result < 0 ? strerror(number) : "");
    syscall(SYS_write, 2, line, length);
    _exit(1);
}

/* Has this process stopped, or a thread of it by a debugger, and go on. */
static void stop(pid_t thread)
{
    ssize_t length = sizeof thread;
    CHECK(write(stopper, &thread, length) == length && read(stopped, &thread, length) == length);
    until_asleep();
}

/* The call goes on after these signals, and succeeds. SIGTRAP: after a debugger. */
static void goes_on(int call, const char *what, int signal, int times)
{
    begin(&call);
    while (times-- > 0) {
        if (signal == SIGSTOP || signal == SIGTRAP)
            stop(signal == SIGTRAP ? sleepers_id : 0);
        else
            interrupt(signal);
    }
    make_ready(call);
    end();
    if (call == ACCEPT && result >= 0)
        CHECK(close(result) == 0);
    long expected = sends(call) ? (long)sizeof buffer : call == ACCEPT ? result : call < TRANSFERS ? 3 : 1;
    if (result < 0 || result != expected)
        wrong(what, call);
    if (call >= TRANSFERS)
        CHECK(recv(ends.server, buffer, 3, MSG_WAITALL) == 3);
}

static void ends_with_eintr(int call, const char *what, int signal)
{
    begin(&call);
    interrupt(signal);
    end();
    if (result != -1 || number != EINTR)
        wrong(what, call);
}

/* A handler that the library does not know ends a call in which the thread sleeps just then. It may be awake for a moment, since an
 * acknowledgement has come: then it sleeps on, and the next signal ends the call. Without the library the first one does. */
static void ends_with_eintr_unseen(int call, const char *what, int signal)
{
    begin(&call);
    do
        interrupt(signal);
    while (!over);
    end();
    if (result != -1 || number != EINTR)
        wrong(what, call);
}

static void each(void (*run)(int))
{
    for (int call = 0; call < CALLS; call++) {
        if (sends(call))
            fill();
        run(call);
    }
    drain(SENDFILE);
}

/* The handler that has run decides, not the others. */
static void mixed(int call)
{
    /* What has sent something says how much. */
    if (call < TRANSFERS) {
        if (!sends(call))
            goes_on(call, "after handlers with SA_RESTART", SIGUSR1, 3);
        ends_with_eintr(call, "after a handler without SA_RESTART", SIGUSR2);
    } else {
        ends_with_eintr(call, "after a handler with SA_RESTART", SIGUSR1);
        ends_with_eintr(call, "after a handler without SA_RESTART", SIGUSR2);
    }
}

/* A send that finds no room at all. */
static void restarts_sending(int call)
{
    if (sends(call) && call != SENDFILE)
        goes_on(call, "after handlers with SA_RESTART", SIGUSR1, 3);
}

static void with_a_limit(int call)
{
    if (call >= TRANSFERS)
        return;
    ends_with_eintr(call, "with a limit, after a handler with SA_RESTART", SIGUSR1);
    ends_with_eintr(call, "with a limit, after a handler without SA_RESTART", SIGUSR2);
}

/* Signals without a handler: ignored ones, and a stop. epoll_wait ends with EINTR after a stop. */
static void without_handler(int call)
{
    if (call == EPOLL_WAIT || call == EPOLL_PWAIT2 || sends(call))
        return;
    goes_on(call, "after a stop", SIGSTOP, 2);
}

/* As gdb and as strace attach. epoll_wait ends with EINTR. */
static void under_a_debugger(int call)
{
    if (call == EPOLL_WAIT || call == EPOLL_PWAIT2 || sends(call))
        return;
    goes_on(call, "under a debugger", SIGTRAP, 4);
}

/* Every way to set a handler. */
static void ways(void)
{
    struct sigaction shown;
    int call = RECV;
    signal(SIGUSR1, count);
    CHECK(sigaction(SIGUSR1, NULL, &shown) == 0 && shown.sa_handler == count && (shown.sa_flags & SA_RESTART));
    goes_on(call, "after signal()", SIGUSR1, 2);
    CHECK(siginterrupt(SIGUSR1, 1) == 0);
    CHECK(sigaction(SIGUSR1, NULL, &shown) == 0 && shown.sa_handler == count && !(shown.sa_flags & SA_RESTART));
    ends_with_eintr(call, "after siginterrupt()", SIGUSR1);
    CHECK(signal(SIGUSR1, count) == count);
    ends_with_eintr(call, "after siginterrupt() and signal()", SIGUSR1);
    CHECK(siginterrupt(SIGUSR1, 0) == 0);
    goes_on(call, "after siginterrupt() was undone", SIGUSR1, 2);
    CHECK(sysv_signal(SIGUSR1, count) == count);
    CHECK(sigaction(SIGUSR1, NULL, &shown) == 0 && shown.sa_handler == count && (shown.sa_flags & SA_RESETHAND));
    ends_with_eintr(call, "after sysv_signal()", SIGUSR1);
    CHECK(sigaction(SIGUSR1, NULL, &shown) == 0 && shown.sa_handler == SIG_DFL);
    struct sigaction action = {.sa_sigaction = count_with_information, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaddset(&action.sa_mask, SIGHUP);
    CHECK(sigaction(SIGUSR1, &action, &shown) == 0 && shown.sa_handler == SIG_DFL);
    goes_on(call, "after a handler with information", SIGUSR1, 2);
    CHECK(sigaction(SIGUSR1, NULL, &shown) == 0 && shown.sa_sigaction == count_with_information);
    CHECK((shown.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_RESTART) && sigismember(&shown.sa_mask, SIGHUP));
    CHECK(signal(SIGUSR1, SIG_IGN) == (void (*)(int))(void *)count_with_information && signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    CHECK(signal(SIGKILL, count) == SIG_ERR && errno == EINVAL && signal(0, count) == SIG_ERR && signal(65, count) == SIG_ERR);
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGRTMIN + 3, &action, NULL) == 0);
    ends_with_eintr(call, "after a real-time signal", SIGRTMIN + 3);
    /* SIGSEGV is one that the library has a handler for itself. */
    handle(SIGSEGV, count, SA_RESTART);
    goes_on(call, "after SIGSEGV with SA_RESTART", SIGSEGV, 2);
    handle(SIGSEGV, count, 0);
    ends_with_eintr(call, "after SIGSEGV", SIGSEGV);
    handle(SIGSEGV, SIG_DFL, 0);
    handle(SIGUSR1, count, SA_RESTART);
    handle_unseen(SIGUSR2, count, 0);
    ends_with_eintr_unseen(call, "after an unseen handler", SIGUSR2);
    goes_on(call, "beside an unseen handler", SIGUSR1, 2);
    handle_unseen(SIGUSR2, count, SA_RESTART);
    goes_on(call, "after an unseen handler with SA_RESTART", SIGUSR2, 2);
    handle(SIGUSR2, count, 0);
}

/* What the child of the last handler has seen is this. */
static void child_saw(int call, long its_result, int its_number)
{
    char text[64] = "";
    int status, length;
    while (waitpid(made, &status, 0) < 0)
        CHECK(errno == EINTR);
    CHECK((length = read(reported, text, sizeof text - 1)) > 0);
    text[length] = 0;
    CHECK(status == 0 && sscanf(text, "%ld %d", &result, &number) == 2);
    if (result != its_result || number != its_number)
        wrong("after a handler that forks, in the child", call);
}

/* Parent and child go on with the call, and each gets its part. */
static void both_go_on(int call)
{
    begin(&call);
    interrupt(SIGUSR1);
    make_ready(call);
    make_ready(call);
    end();
    if (call == ACCEPT && result >= 0)
        CHECK(close(result) == 0 && (result = 3));
    if (result != 3)
        wrong("after a handler with SA_RESTART that forks", call);
    child_saw(call, call == ACCEPT ? 0 : 3, 0);
}

/* The handler forks, and the call returns in both processes. Afterwards the parent's calls sleep and are woken as before. */
static void forks(int call)
{
    /* A fork brings the connection back to the kernel, where there may be room. */
    if (sends(call))
        return;
    ends_with_eintr(call, "after a handler that forks", SIGUSR2);
    child_saw(call, -1, EINTR);
    if (call < TRANSFERS)
        both_go_on(call);
    exchange(ends.client, ends.server, "once more\n");
    if (may_move && !bare)
        exchange_until_on_nic(ends, ends.server);
    goes_on(call, "after the children of handlers", SIGHUP, call < TRANSFERS ? 2 : 0);
}

static void *receives_all(void *only_looks)
{
    char got[16];
    sleepers_id = syscall(SYS_gettid);
    calling = 1;
    result = recv(ends.server, got, 10, MSG_WAITALL | (only_looks ? MSG_PEEK : 0));
    number = errno;
    over = 1;
    return NULL;
}

/* What a call has done when a signal comes it says, whatever the handler's flags. */
static void partly(void)
{
    static char got[16];
    int fds[2] = {SIGUSR1, SIGUSR2};
    for (int at = 0; at < 4; at++) {
        int call = RECV;
        CHECK(write(ends.client, "abcd", 4) == 4);
        for (int there = 0; there < 4;)
            CHECK(ioctl(ends.server, FIONREAD, &there) == 0);
        calling = handled = over = 0;
        CHECK(pthread_create(&sleeper, NULL, receives_all, at < 2 ? NULL : got) == 0);
        until_asleep();
        interrupt(fds[at % 2]);
        end();
        if (result != 4)
            wrong(at < 2 ? "all, after a handler: bytes" : "all, only looking, after a handler: bytes", call);
        if (at >= 2)
            CHECK(read(ends.server, got, 4) == 4);
    }
    for (int call = WRITE; call <= SENDFILE; call++) {
        begin(&call);
        interrupt(SIGUSR1);
        end();
        if (result <= 0 || result >= (long)sizeof buffer)
            wrong("what was sent, after a handler: the number of bytes", call);
        drain(call);
    }
}

/* A process that stops this one, or debugs a thread of it, and lets it go on. Made before there are sockets, which it would share. */
static void start_stopper(void)
{
    int ask[2], answer[2];
    CHECK(pipe(ask) == 0 && pipe(answer) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        pid_t thread;
        ssize_t length = sizeof thread;
        close(ask[1]);
        for (int seizes = 0; read(ask[0], &thread, length) == length; seizes = !seizes) {
            if (thread == 0) {
                kill(parent, SIGSTOP);
                while (state_of(parent, parent) != 'T')
                    ;
                kill(parent, SIGCONT);
            } else {
                debug(parent, thread, seizes);
            }
            CHECK(write(answer[1], &thread, length) == length);
        }
        _exit(0);
    }
    close(ask[0]);
    close(answer[1]);
    stopper = ask[1], stopped = answer[0];
}

int main(int arguments, char **argument)
{
    alarm(STANDS_STILL);
    CHECK(arguments >= 2);
    parent = getpid();
    if (strcmp(argument[1], "stop") == 0 || strcmp(argument[1], "debugger") == 0)
        start_stopper();
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    ends = connect_pair();
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 4) == 0);
    CHECK((epoll = epoll_create1(EPOLL_CLOEXEC)) >= 0);
    CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ends.server, &(struct epoll_event){.events = EPOLLIN}) == 0);
    CHECK((file = open("/proc/self/exe", O_RDONLY)) >= 0);
    int sized = syscall(SYS_memfd_create, "interrupts", 0);
    CHECK(sized >= 0 && ftruncate(sized, sizeof buffer) == 0 && dup2(sized, file) == file);
    /* What is sent at a time is more than fits. */
    CHECK(setsockopt(ends.server, SOL_SOCKET, SO_SNDBUF, &(int){1 << 17}, sizeof(int)) == 0);
    CHECK(setsockopt(ends.client, SOL_SOCKET, SO_RCVBUF, &(int){1 << 17}, sizeof(int)) == 0);
    exchange(ends.client, ends.server, "first\n");
    exchange(ends.server, ends.client, "second\n");
    if ((may_move = arguments > 2))
        until_on_nic(ends.server), until_on_nic(ends.client);
    handle(SIGUSR1, count, SA_RESTART);
    handle(SIGUSR2, count, 0);
    handle(SIGWINCH, nothing, 0);
    if (strcmp(argument[1], "mixed") == 0) {
        each(mixed);
        each(restarts_sending);
    } else if (strcmp(argument[1], "limit") == 0) {
        limit(1000);
        each(with_a_limit);
        limit(0);
        each(mixed);
    } else if (strcmp(argument[1], "stop") == 0) {
        each(without_handler);
    } else if (strcmp(argument[1], "debugger") == 0) {
        each(under_a_debugger);
    } else if (strcmp(argument[1], "ways") == 0) {
        ways();
    } else if (strcmp(argument[1], "forks") == 0 || strcmp(argument[1], "clones") == 0) {
        int both[2], first = argument[1][0] == 'c' ? RAW : 0, behind = first ? RAW + 1 : RAW;
        CHECK(pipe(both) == 0);
        reported = both[0], report = both[1];
        handle(SIGUSR1, fork_and_count, SA_RESTART);
        handle(SIGUSR2, fork_and_count, 0);
        handle(SIGHUP, count, SA_RESTART);
        for (bare = first; bare < behind; bare++)
            for (int call = 0; call < CALLS; call++)
                forks(call);
    } else {
        CHECK(strcmp(argument[1], "partly") == 0);
        partly();
    }
    return 0;
}

/* SIGSEGV and SIGBUS are the program's own, although the library has a handler for them. Usage: faults CASE [moved] */

#include "sockets.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/poll.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <time.h>
#include <sys/wait.h>

static struct pair ends;
static char *hole;
static sigjmp_buf back;
static volatile sig_atomic_t faults;
static void *volatile where;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    CHECK(signal == SIGSEGV || signal == SIGBUS);
    CHECK(context != NULL);
    where = info->si_addr;
    faults++;
    siglongjmp(back, 1);
}

static void plainly(int signal)
{
    CHECK(signal == SIGSEGV);
    faults++;
    siglongjmp(back, 1);
}

static void count(int signal)
{
    (void)signal;
    faults++;
}

/* Whether an access faults and the handler sees it. */
static int is_seen(char *at)
{
    sig_atomic_t before = faults;
    if (sigsetjmp(back, 1) == 0)
        *(volatile char *)at = 1;
    return faults == before + 1;
}

/* A bad pointer in a call is no fault. */
static void call_fails(void)
{
    sig_atomic_t before = faults;
    CHECK(write(ends.client, "hello", 5) == 5);
    CHECK(read(ends.server, hole, 5) == -1 && errno == EFAULT);
    CHECK(write(ends.server, hole, 5) == -1 && errno == EFAULT);
    CHECK(read(ends.server, (char[5]){0}, 5) == 5 && faults == before);
    exchange(ends.server, ends.client, "on\n");
}

/* On a stack that ends where there is no memory: a pointer beyond that end is near the stack, and bad nevertheless. */
static void *call_fails_near_stack(void *beyond)
{
    hole = beyond;
    call_fails();
    return NULL;
}

static void near_stack(void)
{
    enum { STACK = 1 << 18, BEYOND = 1 << 16 };
    char *stack = mmap(NULL, STACK + BEYOND, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(stack != MAP_FAILED && mprotect(stack + STACK, BEYOND, PROT_NONE) == 0 && signal(SIGSEGV, plainly) != SIG_ERR);
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack, STACK) == 0);
    CHECK(pthread_create(&thread, &attributes, call_fails_near_stack, stack + STACK) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(faults == 0);
}

static void use_sigaction(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER}, old;
    sigaddset(&action.sa_mask, SIGUSR1);
    call_fails();
    CHECK(sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_handler == SIG_DFL && old.sa_flags == 0);
    CHECK(sigaction(SIGSEGV, &action, &old) == 0 && old.sa_handler == SIG_DFL);
    CHECK(sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_sigaction == on_fault);
    CHECK((old.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_NODEFER) && sigismember(&old.sa_mask, SIGUSR1) && !sigismember(&old.sa_mask, SIGUSR2));
    CHECK(is_seen(hole) && where == hole);
    call_fails();
    CHECK(is_seen(hole));
    CHECK((void *)signal(SIGSEGV, plainly) == (void *)on_fault && is_seen(hole));
    call_fails();
    CHECK(signal(SIGSEGV, SIG_DFL) == plainly && signal(SIGSEGV, SIG_IGN) == SIG_DFL);
    CHECK(kill(getpid(), SIGSEGV) == 0 && raise(SIGSEGV) == 0);
    CHECK(signal(SIGSEGV, count) == SIG_IGN);
    faults = 0;
    CHECK(raise(SIGSEGV) == 0 && faults == 1);
    call_fails();
}

static void use_sigbus(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    int file = memfd_create("faults", 0);
    CHECK(file >= 0 && ftruncate(file, 4096) == 0);
    hole = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(hole != MAP_FAILED && ftruncate(file, 0) == 0);
    call_fails();
    CHECK(sigaction(SIGBUS, &action, NULL) == 0 && is_seen(hole));
    call_fails();
}

/* Faults in handlers, which interrupt the handling of others: profilers read memory that may not be there. */

static volatile sig_atomic_t samples;

static void read_hole(void)
{
    __asm__ volatile("movb (%0), %%al" : : "r"(hole) : "al", "memory");
}

static void skip(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += 2;
}

static void sample(int signal)
{
    int before = errno;
    (void)signal;
    samples++;
    read_hole();
    errno = before;
}

static void use_profiler(void)
{
    struct sigaction fault = {.sa_sigaction = skip, .sa_flags = SA_SIGINFO | SA_NODEFER}, timer = {.sa_handler = sample};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGPROF, ._sigev_un._tid = syscall(SYS_gettid)};
    struct itimerspec every = {.it_interval.tv_nsec = 20000, .it_value.tv_nsec = 20000};
    timer_t made;
    CHECK(sigaction(SIGSEGV, &fault, NULL) == 0 && sigaction(SIGPROF, &timer, NULL) == 0);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &made) == 0 && timer_settime(made, 0, &every, NULL) == 0);
    while (samples < 20000)
        read_hole();
    CHECK(timer_delete(made) == 0);
    call_fails();
}

/* Valid calls with null, or with a pointer that the kernel does not read: no signal is raised. All threads of a program may share one stack for
 * signals, where two at once would overwrite each other's. */

static char for_signals[1 << 16];
static void *volatile null;

#define QUIET(call) \
    do { \
        CHECK(call); \
        for (size_t at = 0; at < sizeof for_signals; at++) \
            if (for_signals[at] != 7) { \
                fprintf(stderr, "a signal in %s\n", #call); \
                _exit(1); \
            } \
    } while (0)

static void quiet_sets(int fd, int peer)
{
    struct timespec none = {0};
    struct epoll_event event = {.events = EPOLLIN}, got;
    int set = epoll_create1(0);
    for (void *unread = NULL;; unread = hole) {
        QUIET(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
        QUIET(epoll_ctl(set, EPOLL_CTL_DEL, fd, unread) == 0);
        QUIET(epoll_ctl(set, EPOLL_CTL_DEL, fd, unread) == -1 && errno == ENOENT);
        if (unread != NULL)
            break;
    }
    QUIET(epoll_ctl(set, EPOLL_CTL_ADD, fd, NULL) == -1 && errno == EFAULT);
    QUIET(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0);
    QUIET(epoll_ctl(set, EPOLL_CTL_MOD, fd, NULL) == -1 && errno == EFAULT);
    QUIET(send(peer, "x", 1, 0) == 1 && epoll_wait(set, &got, 1, -1) == 1);
    QUIET(epoll_pwait(set, &got, 1, -1, NULL) == 1);
    QUIET(epoll_pwait2(set, &got, 1, NULL, NULL) == 1);
    QUIET(epoll_wait(set, null, 1, 0) == -1 && errno == EFAULT);
    fd_set read;
    FD_ZERO(&read);
    FD_SET(fd, &read);
    QUIET(select(fd + 1, &read, NULL, NULL, NULL) == 1);
    QUIET(pselect(fd + 1, &read, NULL, NULL, NULL, NULL) == 1);
    QUIET(select(fd + 1, NULL, NULL, NULL, &(struct timeval){0}) == 0);
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    QUIET(poll(&entry, 1, -1) == 1 && ppoll(&entry, 1, NULL, NULL) == 1);
    QUIET(poll(NULL, 0, 0) == 0 && ppoll(NULL, 0, &none, NULL) == 0);
    QUIET(poll(null, 1, 0) == -1 && errno == EFAULT);
    QUIET(recv(fd, &got, 1, 0) == 1);
    close(set);
}

static void quiet_transfers(int fd, int peer)
{
    char bytes[4];
    struct iovec vector = {bytes, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    struct mmsghdr messages = {.msg_hdr = message};
    int file = memfd_create("faults", 0);
    CHECK(write(file, "hello", 5) == 5 && lseek(file, 0, SEEK_SET) == 0);
    QUIET(sendto(peer, "x", 1, 0, NULL, 0) == 1 && recvfrom(fd, bytes, 1, 0, NULL, NULL) == 1);
    QUIET(sendto(peer, "x", 1, 0, NULL, 0) == 1 && recvfrom(fd, bytes, 1, 0, NULL, (socklen_t *)hole) == 1);
    QUIET(sendmsg(peer, &message, 0) == 1 && recvmsg(fd, &message, 0) == 1);
    QUIET(sendmmsg(peer, &messages, 1, 0) == 1 && recvmmsg(fd, &messages, 1, 0, NULL) == 1);
    QUIET(send(peer, "x", 1, 0) == 1 && read(fd, bytes, 1) == 1 && recv(fd, bytes, 1, MSG_DONTWAIT) == -1);
    QUIET(sendfile(peer, file, NULL, 1) == 1 && read(fd, bytes, 1) == 1);
    QUIET(sendmsg(peer, NULL, 0) == -1 && errno == EFAULT);
    QUIET(recvmsg(fd, NULL, MSG_DONTWAIT) == -1 && errno == EFAULT);
    QUIET(ioctl(fd, FIONREAD, NULL) == -1 && errno == EFAULT);
    QUIET(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, NULL, 4) == -1 && errno == EFAULT);
    close(file);
}

/* A stream takes no bytes, and leaves out some, without memory for them. */
static void quiet_stream(int fd, int peer)
{
    QUIET(read(fd, NULL, 0) == 0 && write(fd, NULL, 0) == 0 && send(fd, NULL, 0, 0) == 0);
    QUIET(readv(fd, &(struct iovec){NULL, 0}, 1) == 0 && writev(fd, &(struct iovec){NULL, 0}, 1) == 0);
    QUIET(write(peer, "hello", 5) == 5 && recv(fd, NULL, 5, MSG_TRUNC | MSG_WAITALL) == 5);
    QUIET(sigaction(SIGSEGV, NULL, NULL) == 0);
}

static void stay_quiet(void)
{
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_ONSTACK};
    stack_t stack = {.ss_sp = for_signals, .ss_size = sizeof for_signals};
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int datagrams[2] = {socket(AF_INET, SOCK_DGRAM, 0), socket(AF_INET, SOCK_DGRAM, 0)};
    CHECK(bind(datagrams[0], (struct sockaddr *)&address, length) == 0 && getsockname(datagrams[0], (struct sockaddr *)&address, &length) == 0);
    CHECK(connect(datagrams[1], (struct sockaddr *)&address, length) == 0);
    memset(for_signals, 7, sizeof for_signals);
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    quiet_sets(ends.server, ends.client);
    quiet_transfers(ends.server, ends.client);
    quiet_stream(ends.server, ends.client);
    quiet_sets(datagrams[0], datagrams[1]);
    quiet_transfers(datagrams[0], datagrams[1]);
    for_signals[0] = 8;
    CHECK(raise(SIGSEGV) == 0 && faults == 1 && memchr(for_signals, 0, sizeof for_signals) != NULL);
}

/* How a child ends that does something. */
static int end_of(void (*does)(void))
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        does();
        _exit(7);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void access_hole(void)
{
    *(volatile char *)hole = 1;
}

static void send_it(void)
{
    kill(getpid(), SIGSEGV);
    for (;;)
        pause();
}

static void access_while_ignored(void)
{
    signal(SIGSEGV, SIG_IGN);
    access_hole();
}

static void access_twice(void)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_RESETHAND | SA_NODEFER}, now;
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0 && is_seen(hole));
    CHECK(sigaction(SIGSEGV, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
    access_hole();
}

static int deeper(int depth)
{
    volatile char frame[1024];
    frame[0] = depth;
    return depth < 0 ? 0 : deeper(depth + 1) + frame[0];
}

static void on_overflow(int signal)
{
    _exit(signal == SIGSEGV ? 9 : 1);
}

static void fill_stack(void)
{
    static char other[1 << 16];
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
    struct sigaction action = {.sa_handler = on_overflow, .sa_flags = SA_ONSTACK};
    CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    deeper(0);
}

static void fill_stack_unhandled(void)
{
    deeper(0);
}

/* Programs that are executed: a handler is none any more, and what is ignored stays so. */
static void execute(const char *what)
{
    execl("/proc/self/exe", "faults", what, NULL);
}

static void execute_handled(void)
{
    execute("default?");
}

static void execute_ignored(void)
{
    signal(SIGSEGV, SIG_IGN);
    execute("ignored?");
}

static void end(void)
{
    call_fails();
    CHECK(end_of(access_hole) == SIGSEGV);
    CHECK(end_of(send_it) == SIGSEGV);
    CHECK(end_of(access_while_ignored) == SIGSEGV);
    CHECK(end_of(access_twice) == SIGSEGV);
    CHECK(end_of(fill_stack) == -9);
    CHECK(end_of(fill_stack_unhandled) == SIGSEGV);
    CHECK(end_of(execute_handled) == -5);
    CHECK(end_of(execute_ignored) == -5);
}

int main(int number, char **arguments)
{
    CHECK(number >= 2);
    const char *name = arguments[1];
    struct sigaction now;
    CHECK(sigaction(SIGSEGV, NULL, &now) == 0);
    if (strcmp(name, "default?") == 0)
        return now.sa_handler == SIG_DFL ? 5 : 6;
    if (strcmp(name, "ignored?") == 0)
        return now.sa_handler == SIG_IGN ? 5 : 6;
    alarm(STANDS_STILL);
    hole = mmap(NULL, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ends = connect_used(number > 2);
    if (strcmp(name, "sigaction") == 0)
        return use_sigaction(), 0;
    if (strcmp(name, "SIGBUS") == 0)
        return use_sigbus(), 0;
    if (strcmp(name, "profiler") == 0)
        return use_profiler(), 0;
    if (strcmp(name, "near the stack") == 0)
        return near_stack(), 0;
    if (strcmp(name, "ends") == 0)
        return end(), 0;
    if (strcmp(name, "nulls") == 0)
        return stay_quiet(), 0;
    return 2;
}

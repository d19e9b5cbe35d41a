/* Servers that confine themselves: they take connections, filter their system calls (seccomp) down to those which they make themselves,
 * and go on serving. Any other call ends them, as SIGSYS.
 *
 *     sandbox CASE [moved]
 *     sandbox under LIST PROGRAM [ARGUMENT...] */

#include "profiles.h"
#include "sockets.h"
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#define MOST 400
#define PIECE 900
#define ROUNDS 60

static struct sockaddr_in address = {.sin_family = AF_INET};
static socklen_t address_length = sizeof address;
static int listener, moved;

/* Names the call that was not allowed, with EXPLAIN in the environment. */
static void explain(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    char line[] = "system call 000\n";
    for (int at = 14, number = info->si_syscall; at > 11; at--, number /= 10)
        line[at] += number % 10;
    CHECK(write(2, line, sizeof line - 1) > 0);
    _exit(3);
}

/* How a filter is set. */
enum way { BY_PRCTL, BY_SECCOMP, FOR_ALL_THREADS, UNSEEN };

/* seccomp(2) by an instruction of this program's own. */
static long seccomp_unseen(struct sock_fprog *program)
{
    long done;
    __asm__ volatile("syscall" : "=a"(done) : "a"(SYS_seccomp), "D"((long)SECCOMP_SET_MODE_FILTER), "S"(0L), "d"(program) : "rcx", "r11", "memory");
    return done;
}

/* Whether it takes all it can from itself before the filter, as OpenSSH does: no further descriptor, no file, no process. */
static int poor;

/* Lets only these system calls through; the list ends with -1. */
static void confine(enum way way, const int *allowed)
{
    static struct sock_filter code[MOST * 2 + 8] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };
    unsigned short count = 4;
    for (; *allowed >= 0; allowed++) {
        code[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)*allowed, 0, 1);
        code[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    /* The C library does without. */
    code[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1);
    code[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    unsigned otherwise = getenv("EXPLAIN") ? SECCOMP_RET_TRAP : SECCOMP_RET_KILL_PROCESS;
    code[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, otherwise);
    struct sock_fprog program = {count, code};
    struct sigaction handler = {.sa_sigaction = explain, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGSYS, &handler, NULL) == 0);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (poor)
        for (int of = 0; of < 3; of++)
            CHECK(setrlimit((int[]){RLIMIT_NOFILE, RLIMIT_FSIZE, RLIMIT_NPROC}[of], &(struct rlimit){of == 0, of == 0}) == 0);
    if (way == BY_PRCTL)
        CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0);
    else if (way == UNSEEN)
        CHECK(seccomp_unseen(&program) == 0);
    else
        CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, way == FOR_ALL_THREADS ? SECCOMP_FILTER_FLAG_TSYNC : 0, &program) == 0);
}

#define ONLY(way, ...) confine(way, (const int[]){__VA_ARGS__, SYS_exit_group, SYS_restart_syscall, -1})

static unsigned char byte_at(size_t at)
{
    return at * 7 % 251;
}

static void receive(int fd, void *to, size_t length)
{
    for (size_t have = 0; have < length;) {
        ssize_t got = read(fd, (char *)to + have, length - have);
        CHECK(got > 0);
        have += got;
    }
}

static int dial(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&address, address_length) == 0);
    return fd;
}

/* The client's side of an exchange: what it sends comes back. */
static void ask(int fd, unsigned round)
{
    unsigned char piece[PIECE], back[PIECE];
    for (size_t at = 0; at < PIECE; at++)
        piece[at] = byte_at(round * 31 + at);
    CHECK(write(fd, piece, PIECE) == PIECE);
    receive(fd, back, PIECE);
    CHECK(memcmp(piece, back, PIECE) == 0);
}

/* The server's side. */
static void answer(int fd)
{
    unsigned char piece[PIECE];
    receive(fd, piece, PIECE);
    CHECK(write(fd, piece, PIECE) == PIECE);
}

/* Waits until the client, which the system calls of the server's filter do not allow to wait for otherwise, is done. */
static pid_t client(void (*run)(void))
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(listener);
        run();
        _exit(0);
    }
    return child;
}

static void ended_well(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* One connection from before the filter, one from after it. */
static void ask_two(void)
{
    int before = dial();
    for (unsigned round = 0; round < ROUNDS; round++)
        ask(before, round);
    int after = dial();
    for (unsigned round = 0; round < ROUNDS; round++) {
        ask(before, round);
        ask(after, round);
    }
}

/* Takes a connection, answers, and waits for its move. */
static int begin(void)
{
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    for (unsigned round = 0; round < ROUNDS; round++)
        answer(fd);
    if (moved)
        until_on_nic(fd);
    return fd;
}

/* Serves the connection that it has, if any, and those that come, until there is none left. */
static void serve_by_poll(int has)
{
    struct pollfd fds[] = {{.fd = listener, .events = POLLIN}, {.fd = has, .events = POLLIN}, {.fd = -1, .events = POLLIN}};
    for (int open = has >= 0, made = open; made < 2 || open > 0;) {
        CHECK(poll(fds, 3, -1) > 0);
        if (fds[0].revents) {
            int fd = accept(listener, NULL, NULL);
            CHECK(fd >= 0);
            fds[1 + made++].fd = fd;
            open++;
        }
        for (int at = 1; at < 3; at++) {
            unsigned char piece[PIECE];
            if (fds[at].fd < 0 || !fds[at].revents)
                continue;
            ssize_t got = read(fds[at].fd, piece, sizeof piece);
            CHECK(got >= 0 && (got == 0 || write(fds[at].fd, piece, got) == got));
            if (got == 0) {
                CHECK(close(fds[at].fd) == 0);
                fds[at].fd = -1;
                open--;
            }
        }
    }
}

static void plain(enum way way)
{
    pid_t child = client(ask_two);
    int fd = begin();
    ONLY(way, SYS_accept, SYS_read, SYS_write, SYS_close, SYS_poll, SYS_wait4);
    serve_by_poll(fd);
    ended_well(child);
}

static void by_prctl(void)
{
    plain(BY_PRCTL);
}

static void by_seccomp(void)
{
    plain(BY_SECCOMP);
}

/* The first connection comes after the filter. */
static void ask_late(void)
{
    int one = dial(), other = dial();
    for (unsigned round = 0; round < 2 * ROUNDS; round++) {
        ask(one, round);
        ask(other, round);
    }
}

static void before_first(void)
{
    pid_t child = client(ask_late);
    ONLY(BY_PRCTL, SYS_accept, SYS_read, SYS_write, SYS_close, SYS_poll, SYS_wait4);
    serve_by_poll(-1);
    ended_well(child);
}

/* SECCOMP_MODE_STRICT: read, write, and an exit of the thread's own. */
static void ask_one(void)
{
    int fd = dial();
    for (unsigned round = 0; round < 2 * ROUNDS; round++)
        ask(fd, round);
}

static void strict_mode(void)
{
    client(ask_one);
    int fd = begin();
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0) == 0);
    for (unsigned round = 0; round < ROUNDS; round++)
        answer(fd);
    syscall(SYS_exit, 0);
}

/* An epoll set whose connections move before the filter: level, edge and one-shot, each with data that only the program knows. */
static void ask_set(void)
{
    int fds[4];
    for (int at = 0; at < 4; at++)
        fds[at] = dial();
    for (unsigned round = 0; round < 2 * ROUNDS; round++)
        for (int at = 0; at < 4; at++)
            ask(fds[at], round);
}

static void epoll_round(int set, int *fds, const unsigned *events)
{
    for (int left = 4; left > 0; left--) {
        struct epoll_event got;
        CHECK(epoll_wait(set, &got, 1, -1) == 1 && got.data.u64 >> 32 == 0xabcd && (got.events & EPOLLIN));
        unsigned at = (unsigned)got.data.u64;
        CHECK(at < 4);
        answer(fds[at]);
        if (events[at] & EPOLLONESHOT)
            CHECK(epoll_ctl(set, EPOLL_CTL_MOD, fds[at], &(struct epoll_event){events[at], {.u64 = 0xabcdull << 32 | at}}) == 0);
    }
}

static void by_epoll(void)
{
    static const unsigned events[] = {EPOLLIN, EPOLLIN | EPOLLET, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLRDHUP};
    int fds[4], set = epoll_create1(EPOLL_CLOEXEC);
    pid_t child = client(ask_set);
    for (int at = 0; at < 4; at++) {
        CHECK((fds[at] = accept(listener, NULL, NULL)) >= 0);
        CHECK(epoll_ctl(set, EPOLL_CTL_ADD, fds[at], &(struct epoll_event){events[at], {.u64 = 0xabcdull << 32 | at}}) == 0);
    }
    for (unsigned round = 0; round < ROUNDS; round++)
        epoll_round(set, fds, events);
    for (int at = 0; at < 4 && moved; at++)
        until_on_nic(fds[at]);
    ONLY(BY_PRCTL, SYS_read, SYS_write, SYS_close, SYS_epoll_wait, SYS_epoll_ctl, SYS_wait4);
    for (unsigned round = 0; round < ROUNDS; round++)
        epoll_round(set, fds, events);
    /* A registration that was not touched since is gone with its descriptor. */
    for (int at = 0; at < 4; at++)
        CHECK(close(fds[at]) == 0);
    ended_well(child);
    /* Baton's agent may have copies of descriptors for some milliseconds. */
    struct epoll_event got;
    while (epoll_wait(set, &got, 1, 0) > 0)
        continue;
}

/* Threads that sleep, each in another call, while one sets a filter for all. */
#define THREADS 6
static int ends[THREADS], done[2], never[2];

static void *sleeper(void *which)
{
    size_t at = (size_t)which;
    unsigned char piece[PIECE];
    struct iovec vector = {piece, PIECE};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    struct pollfd entry = {.fd = ends[at], .events = POLLIN};
    struct epoll_event event = {EPOLLIN, {.u64 = 77}};
    fd_set set;
    int epoll = at == 5 ? epoll_create1(EPOLL_CLOEXEC) : -1;
    FD_ZERO(&set);
    if (at == 5)
        CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[at], &event) == 0);
    for (unsigned round = 0; round < 2 * ROUNDS; round++) {
        size_t have = 0;
        switch (at) {
        case 1:
            CHECK(recv(ends[at], piece, PIECE, MSG_WAITALL) == PIECE);
            have = PIECE;
            break;
        case 2:
            CHECK(recvmsg(ends[at], &message, MSG_WAITALL) == PIECE);
            have = PIECE;
            break;
        case 3:
            CHECK(poll(&entry, 1, 60000) == 1);
            break;
        case 4:
            FD_SET(ends[at], &set);
            CHECK(select(ends[at] + 1, &set, NULL, NULL, NULL) == 1 && FD_ISSET(ends[at], &set));
            break;
        case 5:
            CHECK(epoll_wait(epoll, &event, 1, -1) == 1 && event.data.u64 == 77);
            break;
        }
        receive(ends[at], piece + have, PIECE - have);
        CHECK(write(ends[at], piece, PIECE) == PIECE);
    }
    CHECK(write(done[1], "", 1) == 1);
    /* Ended with its process: the end of a thread makes calls of its own. */
    CHECK(read(never[0], piece, 1) == 1);
    return NULL;
}

static void ask_threads(void)
{
    int fds[THREADS], main = dial();
    for (int at = 0; at < THREADS; at++)
        fds[at] = dial();
    unsigned char go;
    for (unsigned round = 0; round < 2 * ROUNDS; round++) {
        if (round == ROUNDS)
            receive(main, &go, 1);
        for (int at = 0; at < THREADS; at++)
            ask(fds[at], round);
        if (round == ROUNDS - 1)
            CHECK(write(main, "", 1) == 1);
    }
    receive(main, &go, 1);
}

static void threads(enum way way)
{
    pid_t child = client(ask_threads);
    int main = accept(listener, NULL, NULL);
    CHECK(pipe(done) == 0 && pipe(never) == 0);
    for (size_t at = 0; at < THREADS; at++) {
        pthread_t thread;
        CHECK((ends[at] = accept(listener, NULL, NULL)) >= 0);
        CHECK(pthread_create(&thread, NULL, sleeper, (void *)at) == 0);
    }
    char got;
    receive(main, &got, 1);
    for (int at = 0; at < THREADS && moved; at++)
        until_on_nic(ends[at]);
    ONLY(way, SYS_read, SYS_write, SYS_recvfrom, SYS_recvmsg, SYS_poll, SYS_select, SYS_pselect6, SYS_epoll_wait, SYS_wait4);
    CHECK(write(main, "", 1) == 1);
    for (int at = 0; at < THREADS; at++)
        receive(done[0], &got, 1);
    CHECK(write(main, "", 1) == 1);
    ended_well(child);
}

static void for_one_thread(void)
{
    threads(BY_PRCTL);
}

static void for_all_threads(void)
{
    threads(FOR_ALL_THREADS);
}

/* Each call of which the library has a version of its own, on a connection and on other descriptors: none becomes another one, and none
 * makes one more. */
static void ask_calls(void)
{
    int fd = dial();
    for (unsigned round = 0; round < ROUNDS; round++)
        ask(fd, round);
    for (unsigned round = 0; round < 12; round++)
        ask(fd, round);
    unsigned char got[3];
    receive(fd, got, sizeof got);
    CHECK(memcmp(got, "abc", 3) == 0 && read(fd, got, 1) == 0);
}

static void calls(void)
{
    pid_t child = client(ask_calls);
    int fd = begin(), file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), pair[2], value = 1, copy;
    unsigned char piece[PIECE];
    struct iovec vectors[] = {{piece, 400}, {piece + 400, PIECE - 400}};
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = 2};
    struct mmsghdr several = {.msg_hdr = message};
    socklen_t length = sizeof value;
    struct timespec zero = {0, 0};
    struct timeval none = {0, 0};
    struct pollfd entry = {.fd = fd, .events = POLLOUT};
    struct epoll_event event = {EPOLLOUT, {.u64 = 5}};
    fd_set set;
    CHECK(file >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    ONLY(BY_PRCTL, SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_recvfrom, SYS_sendto, SYS_recvmsg, SYS_sendmsg, SYS_recvmmsg, SYS_sendmmsg,
         SYS_sendfile, SYS_splice, SYS_shutdown, SYS_getsockopt, SYS_setsockopt, SYS_dup, SYS_dup2, SYS_dup3, SYS_fcntl, SYS_ioctl, SYS_close,
         SYS_ppoll, SYS_select, SYS_pselect6, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_socket, SYS_listen, SYS_wait4);
    answer(fd);
    for (int way = 0; way < 5; way++) {
        CHECK(recv(fd, piece, PIECE, MSG_WAITALL) == PIECE);
        switch (way) {
        case 0: CHECK(send(fd, piece, PIECE, MSG_NOSIGNAL) == PIECE); break;
        case 1: CHECK(sendto(fd, piece, PIECE, 0, NULL, 0) == PIECE); break;
        case 2: CHECK(writev(fd, vectors, 2) == PIECE); break;
        case 3: CHECK(sendmsg(fd, &message, 0) == PIECE); break;
        case 4: CHECK(sendmmsg(fd, &several, 1, 0) == 1 && several.msg_len == PIECE); break;
        }
    }
    for (int way = 0; way < 4; way++) {
        ssize_t got = 0;
        struct pollfd readable = {.fd = fd, .events = POLLIN};
        /* All of it is there: the client sent it at once, and waits. */
        CHECK(recv(fd, piece, PIECE, MSG_WAITALL | MSG_PEEK) == PIECE && ppoll(&readable, 1, NULL, NULL) == 1);
        switch (way) {
        case 0: got = recvfrom(fd, piece, PIECE, 0, NULL, NULL); break;
        case 1: got = readv(fd, vectors, 2); break;
        case 2: got = recvmsg(fd, &message, 0); break;
        case 3: got = recvmmsg(fd, &several, 1, 0, NULL) == 1 ? several.msg_len : 0; break;
        }
        CHECK(got == PIECE && write(fd, piece, PIECE) == PIECE);
    }
    CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value) == 0);
    CHECK(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0 && value == 1);
    CHECK(ioctl(fd, FIONREAD, &value) == 0 && fcntl(fd, F_GETFL) >= 0);
    CHECK(ppoll(&entry, 1, &zero, NULL) == 1);
    FD_ZERO(&set);
    FD_SET(fd, &set);
    CHECK(select(fd + 1, NULL, &set, NULL, &none) == 1 && pselect(fd + 1, NULL, &set, NULL, &zero, NULL) == 1);
    int watch = epoll_create1(0);
    CHECK(watch >= 0 && epoll_ctl(watch, EPOLL_CTL_ADD, fd, &event) == 0 && epoll_pwait(watch, &event, 1, -1, NULL) == 1 && event.data.u64 == 5);
    CHECK((copy = dup(fd)) >= 0 && dup2(fd, copy) == copy && dup3(fd, copy, O_CLOEXEC) == copy && close(copy) == 0);
    CHECK((copy = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0 && close(copy) == 0);
    CHECK(dup2(pair[0], copy) == copy && close(copy) == 0 && dup3(pair[0], copy, 0) == copy && close(copy) == 0);
    CHECK((copy = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && listen(copy, 1) == 0 && close(copy) == 0);
    answer(fd);
    receive(fd, piece, PIECE);
    CHECK(sendfile(pair[0], file, NULL, 10) == 10 && recv(pair[1], piece + PIECE - 10, 10, 0) == 10);
    /* What came back was spoilt on purpose: the last round's bytes are made again. */
    for (size_t at = 0; at < PIECE; at++)
        piece[at] = byte_at(11 * 31 + at);
    CHECK(write(fd, piece, PIECE) == PIECE);
    CHECK(write(fd, "abc", 3) == 3 && shutdown(fd, SHUT_WR) == 0);
    ended_well(child);
    close(fd);
}

/* Forks under its filter; parent and child each answer on the connection. */
static void forks(void)
{
    pid_t child = client(ask_one);
    int fd = begin();
    ONLY(BY_PRCTL, SYS_read, SYS_write, SYS_close, SYS_wait4, SYS_clone, SYS_set_robust_list, SYS_rt_sigprocmask, SYS_gettid);
    for (unsigned round = 0; round < ROUNDS; round += 4) {
        pid_t answers = fork();
        if (answers == 0) {
            answer(fd);
            answer(fd);
            _exit(0);
        }
        ended_well(answers);
        answer(fd);
        answer(fd);
    }
    ended_well(child);
}

/* Has a connection, and a filter, until its standard input ends. */
static void stays(void)
{
    client(ask_one);
    int fd = begin();
    ONLY(BY_PRCTL, SYS_read, SYS_write);
    char got;
    CHECK(write(STDOUT_FILENO, "ready\n", 6) == 6 && read(STDIN_FILENO, &got, 1) == 0);
    for (unsigned round = 0; round < ROUNDS; round++)
        answer(fd);
}

/* Serves the connection that it has, and can get no other. */
static void limited(void)
{
    pid_t child = client(ask_one);
    int fd = begin();
    poor = 1;
    ONLY(BY_PRCTL, SYS_read, SYS_write, SYS_wait4);
    for (unsigned round = 0; round < ROUNDS; round++)
        answer(fd);
    ended_well(child);
}

/* Serves without a filter of its own. */
static void served(void)
{
    pid_t child = client(ask_two);
    serve_by_poll(begin());
    ended_well(child);
}

/* What `served` needs, and its start. */
#define FEWER \
    SYS_execve, SYS_brk, SYS_mmap, SYS_munmap, SYS_mprotect, SYS_openat, SYS_newfstatat, SYS_fstat, SYS_read, SYS_pread64, SYS_close, SYS_access, \
    SYS_arch_prctl, SYS_set_tid_address, SYS_set_robust_list, SYS_rseq, SYS_prlimit64, SYS_getrandom, SYS_alarm, SYS_socket, SYS_bind, \
    SYS_listen, SYS_getsockname, SYS_getsockopt, SYS_clone, SYS_connect, SYS_accept, SYS_poll, SYS_write, SYS_wait4, SYS_sched_yield

/* All system calls that the library makes for itself, as its documentation has them. */
#define LIBRARY \
    SYS_statx, SYS_lseek, SYS_getdents64, SYS_readlink, SYS_readlinkat, SYS_fallocate, SYS_munlock, SYS_madvise, SYS_fcntl, SYS_dup3, SYS_socketpair, \
    SYS_getpeername, SYS_setsockopt, SYS_sendto, SYS_recvfrom, SYS_sendmsg, SYS_recvmsg, SYS_shutdown, SYS_ioctl, SYS_accept4, SYS_ppoll, \
    SYS_epoll_ctl, SYS_epoll_wait, SYS_epoll_pwait, SYS_eventfd2, SYS_futex, SYS_clock_nanosleep, SYS_clock_gettime, SYS_getpid, SYS_gettid, \
    SYS_geteuid, SYS_tgkill, SYS_rt_tgsigqueueinfo, SYS_rt_sigprocmask, SYS_rt_sigaction, SYS_sched_getaffinity

/* Executes a program under a filter: under LIST COMMAND... */
static void execute_under(char **arguments)
{
    static const int docker[] = {DOCKER, -1}, podman[] = {PODMAN, -1}, service[] = {SYSTEM_SERVICE, -1}, fewer[] = {FEWER, SYS_exit_group, -1},
                     enough[] = {FEWER, LIBRARY, SYS_exit_group, SYS_restart_syscall, -1};
    static int without[MOST];
    const char *list = arguments[0];
    if (strcmp(list, "docker") == 0)
        confine(BY_SECCOMP, docker);
    else if (strcmp(list, "podman") == 0)
        confine(BY_SECCOMP, podman);
    else if (strcmp(list, "system-service") == 0)
        confine(BY_PRCTL, service);
    else if (strcmp(list, "fewer") == 0)
        confine(BY_SECCOMP, fewer);
    else if (strcmp(list, "enough") == 0)
        confine(BY_SECCOMP, enough);
    else if (strcmp(list, "fewer, unseen") == 0)
        confine(UNSEEN, fewer);
    else if (strcmp(list, "no eventfd") == 0 || strcmp(list, "no readlink") == 0) {
        int count = 0;
        for (const int *call = docker; *call >= 0; call++)
            if (*call != (strcmp(list, "no eventfd") == 0 ? SYS_eventfd2 : SYS_readlink))
                without[count++] = *call;
        without[count] = -1;
        confine(BY_PRCTL, without);
    } else
        CHECK(!list);
    execv(arguments[1], arguments + 1);
    CHECK(!"execv");
}

static volatile sig_atomic_t wants_child;
static volatile pid_t made;

static void fork_once(int signal)
{
    (void)signal;
    if (wants_child) {
        wants_child = 0;
        made = fork();
    }
}

/* A handler forks that has interrupted a call which sleeps; the child filters its calls, and has its own actions in the kernel then. */
static void fork_in_handler(void)
{
    struct sigaction action = {.sa_handler = fork_once};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    struct itimerspec every = {.it_interval.tv_nsec = 20000000, .it_value.tv_nsec = 20000000};
    struct pair pair = connect_pair();
    timer_t timer;
    char byte;
    int status;
    exchange(pair.client, pair.server, "hello\n");
    exchange(pair.server, pair.client, "hello\n");
    while (moved && !is_on_nic(pair.server))
        exchange(pair.client, pair.server, "hello\n");
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &every, NULL) == 0);
    for (int round = 0; round < 4; round++) {
        for (wants_child = 1; wants_child;)
            CHECK(recv(pair.server, &byte, 1, 0) == -1 && errno == EINTR);
        if (made == 0) {
            struct { void (*handler)(int); unsigned long flags; void *restorer; unsigned long mask; } shown;
            ONLY(BY_PRCTL, SYS_write, SYS_rt_sigaction, SYS_rt_sigreturn);
            CHECK(syscall(SYS_rt_sigaction, SIGUSR1, NULL, &shown, sizeof shown.mask) == 0 && shown.handler == fork_once);
            _exit(0);
        }
        CHECK(made > 0);
        while (waitpid(made, &status, 0) < 0)
            CHECK(errno == EINTR);
        CHECK(status == 0);
    }
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {{"prctl", by_prctl}, {"seccomp", by_seccomp}, {"before the first", before_first}, {"strict mode", strict_mode}, {"epoll", by_epoll}, {"one thread", for_one_thread}, {"all threads", for_all_threads}, {"calls", calls}, {"forks", forks}, {"limited", limited}, {"stays", stays}, {"served", served}, {"in a handler", fork_in_handler}};
    alarm(STANDS_STILL);
    CHECK(count >= 2);
    if (count > 3 && strcmp(arguments[1], "under") == 0)
        execute_under(arguments + 2);
    moved = count > 2 && strcmp(arguments[2], "moved") == 0;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK((listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
    CHECK(bind(listener, (struct sockaddr *)&address, address_length) == 0 && listen(listener, 16) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &address_length) == 0);
    return run_case(cases, sizeof cases / sizeof *cases, arguments[1]);
}

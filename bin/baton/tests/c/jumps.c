/* Calls on sockets that a signal handler leaves by siglongjmp, while they run and while they sleep. Usage: jumps CASE [moved]
 *
 * Nothing is left of such a call: no descriptor, no lock, no memory that is damaged; its connection works, and moves. */

#include "ends.h"
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/uio.h>
#include <time.h>

#define ROUNDS 40

static int full;
static struct sockaddr_in nobody = {.sin_family = AF_INET};
static sigjmp_buf back;
static volatile sig_atomic_t armed, nests, to_streams;
static sigset_t timers;

static void await(int fd)
{
    char byte;
    recv(fd, &byte, 1, 0);
}

static void leave(int signal)
{
    (void)signal;
    if (!armed)
        return;
    if (nests > 0) {
        /* The next signal leaves both this call and what this handler has interrupted. */
        nests--;
        await(ends.client);
        return;
    }
    armed = 0;
    if (to_streams) {
        FILE *stream = fdopen(dup(ends.server), "w");
        CHECK(stream != NULL && fclose(stream) == 0);
    }
    siglongjmp(back, 1);
}

/* Calls that sleep until the handler leaves them. */
static void sleep_in(int call)
{
    struct pollfd entry = {ends.server, POLLIN, 0};
    struct iovec pieces[2] = {{some, 10}, {some + 10, 10}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    struct epoll_event event;
    fd_set read;
    long done = 0;
    FD_ZERO(&read);
    FD_SET(ends.server, &read);
    switch (call) {
    case 0: done = poll(&entry, 1, -1); break;
    case 1: done = ppoll(&entry, 1, NULL, NULL); break;
    case 2: done = select(ends.server + 1, &read, NULL, NULL, NULL); break;
    case 3: done = epoll_wait(set, &event, 1, -1); break;
    case 4: done = recv(ends.server, some, 100, 0); break;
    case 5: done = recv(ends.server, some, 100, MSG_WAITALL); break;
    case 6: done = readv(ends.server, pieces, 2); break;
    case 7: done = recvmsg(ends.server, &message, 0); break;
    case 8: done = accept(full, NULL, NULL); break;
    case 9:
        do
            done = send(ends.client, some, sizeof some, 0);
        while (done > 0);
        break;
    case 10: {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        static volatile int made;
        CHECK(fd >= 0);
        made = fd;
        if (sigsetjmp(back, 1) == 0) {
            armed = 1;
            done = connect(fd, (struct sockaddr *)&nobody, sizeof nobody);
        } else {
            CHECK(close(made) == 0);
            return;
        }
    }
    }
    CHECK(done == -1 && 0);
}
#define SLEEPS 11

/* Calls that do not sleep, again and again. */
static void run_in(int call)
{
    struct pollfd entries[2] = {{ends.server, POLLIN, 0}, {ends.client, POLLIN, 0}};
    struct timeval none = {0, 0};
    struct epoll_event event;
    fd_set read;
    int waiting;
    for (;;) {
        FD_ZERO(&read);
        FD_SET(ends.server, &read);
        switch (call) {
        case 0: poll(entries, 2, 0); break;
        case 1: select(ends.server + 1, &read, NULL, NULL, &none); break;
        case 2: epoll_wait(set, &event, 1, 0); break;
        case 3: recv(ends.server, some, 100, MSG_DONTWAIT); break;
        case 4: ioctl(ends.server, FIONREAD, &waiting); break;
        case 5:
            send(ends.client, some, 10, MSG_DONTWAIT);
            recv(ends.server, some, 100, MSG_DONTWAIT);
            break;
        case 6:
            send(ends.client, some, 1000, MSG_DONTWAIT);
            recv(ends.server, some, 1000, 0);
            break;
        case 7: getsockopt(ends.server, SOL_SOCKET, SO_ERROR, &waiting, &(socklen_t){sizeof waiting}); break;
        }
    }
}
#define RUNS 8

static void play(void (*calls)(int), int call)
{
    open_ends();
    for (int round = 0; round < ROUNDS; round++) {
        static void *volatile kept;
        kept = malloc(1 + round * 100);
        nests = round % 5 == 4;
        if (sigsetjmp(back, 1) == 0) {
            armed = calls != sleep_in || call != 10;
            CHECK(pthread_sigmask(SIG_UNBLOCK, &timers, NULL) == 0);
            calls(call);
        }
        CHECK(pthread_sigmask(SIG_BLOCK, &timers, NULL) == 0);
        free(kept);
        /* It can be cancelled as before. */
        int state;
        CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_ENABLE);
    }
    /* What it has received is of no interest. */
    while (calls == sleep_in && call != 9 && recv(ends.server, some, sizeof some, MSG_DONTWAIT) > 0)
        ;
    close_ends(calls == sleep_in && call != 9);
}

/* A handler makes a stream of the connection, which is the C library's from then on, and leaves the call. */
static void leave_to_stream(int call)
{
    open_ends();
    to_streams = 1;
    if (sigsetjmp(back, 1) == 0) {
        armed = 1;
        CHECK(pthread_sigmask(SIG_UNBLOCK, &timers, NULL) == 0);
        sleep_in(call);
    }
    CHECK(pthread_sigmask(SIG_BLOCK, &timers, NULL) == 0);
    to_streams = 0;
    close_ends(0);
}

static void *rest(void *unused)
{
    for (;;)
        pause();
    return unused;
}

int main(int number, char **arguments)
{
    CHECK(number >= 2);
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1, ._sigev_un._tid = syscall(SYS_gettid)};
    struct itimerspec every = {.it_interval.tv_nsec = 1000000, .it_value.tv_nsec = 1000000};
    static char other[1 << 16];
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
    socklen_t length = sizeof nobody;
    timer_t timer;
    int before = 0;
    alarm(STANDS_STILL);
    may_move = number > 2;
    sigaddset(&timers, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &timers, NULL) == 0);
    if (strcmp(arguments[1], "threads") == 0) {
        pthread_t idle;
        CHECK(pthread_create(&idle, NULL, rest, NULL) == 0);
    }
    /* A listener that has no room left: a connect sleeps. */
    full = socket(AF_INET, SOCK_STREAM, 0);
    nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(bind(full, (struct sockaddr *)&nobody, length) == 0 && listen(full, 0) == 0);
    CHECK(getsockname(full, (struct sockaddr *)&nobody, &length) == 0);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &every, NULL) == 0);
    for (int pass = 0; pass < 3; pass++) {
        struct sigaction action = {.sa_handler = leave, .sa_flags = SA_NODEFER | (pass == 2 ? SA_ONSTACK : 0)};
        CHECK(sigaltstack(&stack, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
        for (int call = 0; call < SLEEPS; call++) {
            if (call == 10) {
                int first = socket(AF_INET, SOCK_STREAM, 0);
                CHECK(connect(first, (struct sockaddr *)&nobody, sizeof nobody) == 0);
                play(sleep_in, call);
                CHECK(close(first) == 0 && close(accept(full, NULL, NULL)) == 0);
            } else {
                play(sleep_in, call);
            }
        }
        for (int call = 0; call < RUNS; call++)
            play(run_in, call);
        for (int call = 0; call < 8; call++)
            leave_to_stream(call);
        int now = count_descriptors();
        CHECK(pass == 0 || now == before);
        before = now;
    }
    return 0;
}

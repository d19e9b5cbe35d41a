/* Threads that are cancelled in calls on sockets, or that a signal handler ends there. Usage: cancel CASE [moved]
 *
 * Their clean-up handlers run; nothing is left of the call: no descriptor, no lock; its connection works, and moves. */

#include "ends.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/select.h>
#include <sys/uio.h>

#define ROUNDS 10

static int listener, silent[2], type;
static atomic_int thread, cleaned, calls;

static void clean(void *unused)
{
    (void)unused;
    cleaned++;
}

/* Calls that sleep. */
static void sleep_in(int call)
{
    struct pollfd entry = {ends.server, POLLIN, 0};
    struct iovec pieces[2] = {{some, 10}, {some + 10, 10}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    struct epoll_event event;
    fd_set read_set;
    FD_ZERO(&read_set);
    FD_SET(ends.server, &read_set);
    switch (call) {
    case 0: poll(&entry, 1, -1); break;
    case 1: ppoll(&entry, 1, NULL, NULL); break;
    case 2: select(ends.server + 1, &read_set, NULL, NULL, NULL); break;
    case 3: epoll_wait(set, &event, 1, -1); break;
    case 4: recv(ends.server, some, 100, 0); break;
    case 5: read(ends.server, some, 100); break;
    case 6: readv(ends.server, pieces, 2); break;
    case 7: recvmsg(ends.server, &message, 0); break;
    case 8: accept(listener, NULL, NULL); break;
    case 9: read(silent[0], some, 1); break;
    case 10:
        while (send(ends.client, some, sizeof some, 0) > 0)
            ;
    }
    CHECK(0);
}
#define SLEEPS 11

/* Calls that do not sleep. */
static void run_in(int call)
{
    if (call < CALLS_AT_ONCE) {
        call_at_once(call);
    } else {
        call_at_once(3);
        call_at_once(2);
    }
    calls++;
}
#define RUNS (CALLS_AT_ONCE + 1)

static int call_of_thread, sleeps;

static void *work(void *unused)
{
    pthread_cleanup_push(clean, NULL);
    CHECK(pthread_setcanceltype(type, NULL) == 0);
    thread = syscall(SYS_gettid);
    if (sleeps)
        sleep_in(call_of_thread);
    for (;;)
        run_in(call_of_thread);
    pthread_cleanup_pop(1);
    return unused;
}

static void end_here(int signal)
{
    (void)signal;
    pthread_exit((void *)7);
}

static void look(int id, const char *file, char *text, size_t room)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/%s", id, file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, text, room - 1);
    CHECK(fd >= 0 && got > 0);
    close(fd);
    text[got] = 0;
}

/* Waits until the thread sleeps in a call for a descriptor: not for a lock. */
static void until_asleep(int id)
{
    char line[512], call[512];
    do {
        sched_yield();
        look(id, "stat", line, sizeof line);
        look(id, "syscall", call, sizeof call);
    } while (strrchr(line, ')')[2] != 'S' || call[0] == 'r' || call[0] == '-' || atoi(call) == SYS_futex);
}

static void play(int call, int asleep, int by_handler)
{
    open_ends();
    call_of_thread = call;
    sleeps = asleep;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t made;
        void *result;
        thread = cleaned = calls = 0;
        CHECK(pthread_create(&made, NULL, work, NULL) == 0);
        while (thread == 0 || (!asleep && calls < 10 * round))
            sched_yield();
        /* Only system calls are safe for a thread that may be cancelled at any time. */
        if (asleep && (round > 0 || type == PTHREAD_CANCEL_ASYNCHRONOUS))
            until_asleep(thread);
        if (by_handler)
            CHECK(pthread_kill(made, SIGUSR1) == 0);
        else
            CHECK(pthread_cancel(made) == 0);
        CHECK(pthread_join(made, &result) == 0);
        CHECK(result == (by_handler ? (void *)7 : PTHREAD_CANCELED) && cleaned == 1);
    }
    close_ends(asleep && call < 10);
}

int main(int number, char **arguments)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sigaction action = {.sa_handler = end_here};
    int before = 0;
    CHECK(number >= 2);
    alarm(STANDS_STILL);
    may_move = number > 2;
    int by_handler = strcmp(arguments[1], "exit") == 0;
    type = strcmp(arguments[1], "at any time") == 0 ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0 && pipe(silent) == 0);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 1) == 0);
    for (int pass = 0; pass < 2; pass++) {
        for (int call = 0; call < SLEEPS; call++)
            play(call, 1, by_handler);
        for (int call = 0; call < RUNS && type == PTHREAD_CANCEL_DEFERRED; call++)
            play(call, 0, by_handler);
        int now = count_descriptors();
        CHECK(pass == 0 || now == before);
        before = now;
    }
    return 0;
}

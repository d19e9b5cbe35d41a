/* Programs that watch their sockets with epoll and count events that epoll_wait should not have reported.

   events churn SECONDS CONNECTIONS WORKERS   A thread waits and removes each reported socket from the set (EPOLL_CTL_DEL). A worker (the
                                              thread itself if WORKERS is 0) reads, answers and adds it again (EPOLL_CTL_ADD).
   events oneshot SECONDS CONNECTIONS WORKERS Several threads wait with one set; sockets are EPOLLONESHOT, and armed with EPOLL_CTL_MOD.
   events client SECONDS CONNECTIONS THREADS  Clients like wrk and redis: a non-blocking connect, EPOLL_CTL_MOD to
                                              EPOLLIN | EPOLLOUT, write, EPOLL_CTL_MOD to EPOLLIN, read.

   Prints "requests REQUESTS outside N twice N empty N late N": events of sockets that were not in the set (or not armed), sockets that were
   reported twice in one call, sockets reported as readable that were not, and the longest time between two answers on one connection in
   milliseconds. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1024, LENGTH = 100, ASKERS = 8 };

static double seconds;
static int connections, others, one_shot;
static struct sockaddr_in address;
static atomic_long requests, outside, twice, empty, late;
static atomic_int in_set[MOST], stopped, over;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void note_late(double since) {
    long took = (now() - since) * 1000, known = late;
    while (took > known && !atomic_compare_exchange_weak(&late, &known, took)) {}
}

static pthread_t start(void *(*what)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, what, argument)) fail("pthread_create");
    return thread;
}

static void set_nonblocking(int fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static void exactly(int fd, char *bytes, int sending) {
    for (int done = 0; done < LENGTH;) {
        ssize_t count = sending ? write(fd, bytes + done, LENGTH - done) : read(fd, bytes + done, LENGTH - done);
        if (count <= 0) fail(sending ? "write" : "read");
        done += count;
    }
}

/* ---- the server that removes sockets from its set ---- */

static int set, sockets[MOST];
static int queue[MOST * 4];
static unsigned head, tail;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t some = PTHREAD_COND_INITIALIZER;

/* Answers all requests that wait. Returns whether there were any. */
static int answer(int at) {
    char bytes[LENGTH];
    ssize_t count = read(sockets[at], bytes, LENGTH);
    if (count < 0 && errno == EAGAIN) return 0;
    if (count < 0) fail("read");
    if (count && write(sockets[at], bytes, count) != count) fail("write");
    return 1;
}

static void put_in(int at) {
    struct epoll_event event = {.events = EPOLLIN | (one_shot ? EPOLLONESHOT : 0), .data.u64 = at};
    in_set[at] = 1;
    if (epoll_ctl(set, one_shot ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, sockets[at], &event)) fail("epoll_ctl");
}

static void serve(int at) {
    if (!answer(at)) empty++;
    put_in(at);
}

static void *worker(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (head == tail) pthread_cond_wait(&some, &lock);
        int at = queue[tail++ % (MOST * 4)];
        pthread_mutex_unlock(&lock);
        serve(at);
    }
    return unused;
}

static void *waiter(void *unused) {
    struct epoll_event events[48];
    while (!over) {
        int count = epoll_wait(set, events, 48, 100);
        for (int first = 0; first < count; first++)
            for (int second = 0; second < first; second++) twice += events[first].data.u64 == events[second].data.u64;
        for (int event = 0; event < count; event++) {
            int at = events[event].data.u64;
            if (!atomic_exchange(&in_set[at], 0)) {
                outside++;
                continue;
            }
            if (!one_shot && epoll_ctl(set, EPOLL_CTL_DEL, sockets[at], NULL)) fail("EPOLL_CTL_DEL");
            if (one_shot || !others) {
                serve(at);
                continue;
            }
            pthread_mutex_lock(&lock);
            queue[head++ % (MOST * 4)] = at;
            pthread_cond_signal(&some);
            pthread_mutex_unlock(&lock);
        }
    }
    return unused;
}

static int asking[MOST];

/* Every ASKERS-th connection, from a certain one. */
static void *ask(void *first) {
    char bytes[LENGTH] = "question";
    double asked[MOST];
    while (!stopped) {
        for (int at = (long)first; at < connections; at += ASKERS) {
            asked[at] = now();
            exactly(asking[at], bytes, 1);
        }
        for (int at = (long)first; at < connections; at += ASKERS) {
            exactly(asking[at], bytes, 0);
            note_late(asked[at]);
            requests++;
        }
    }
    return NULL;
}

static void churn(int listener) {
    pthread_t askers[ASKERS];
    set = epoll_create1(0);
    for (int at = 0; at < connections; at++) {
        asking[at] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(asking[at], (struct sockaddr *)&address, sizeof address)) fail("connect");
        sockets[at] = accept(listener, NULL, NULL);
        set_nonblocking(sockets[at]);
        struct epoll_event event = {.events = 0, .data.u64 = at};
        if (one_shot && epoll_ctl(set, EPOLL_CTL_ADD, sockets[at], &event)) fail("EPOLL_CTL_ADD");
        put_in(at);
    }
    for (int at = 0; at < ASKERS; at++) askers[at] = start(ask, (void *)(long)at);
    pthread_t first = start(waiter, NULL);
    for (int at = 0; at < others; at++) start(one_shot ? waiter : worker, NULL);
    /* Waits: the threads go on for so long. */
    usleep(seconds * 1e6);
    stopped = 1;
    for (int at = 0; at < ASKERS; at++) pthread_join(askers[at], NULL);
    over = 1;
    pthread_join(first, NULL);
}

/* ---- the clients ---- */

static void *echo(void *given) {
    int fd = (long)given;
    char bytes[LENGTH];
    ssize_t count;
    while ((count = read(fd, bytes, LENGTH)) > 0 && write(fd, bytes, count) == count) {}
    close(fd);
    return NULL;
}

static void *accept_all(void *given) {
    for (;;) start(echo, (void *)(long)accept((int)(long)given, NULL, NULL));
    return NULL;
}

static void modify(int epoll, int fd, int at, int events) {
    struct epoll_event event = {.events = events, .data.u64 = at};
    if (epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event)) fail("EPOLL_CTL_MOD");
}

static void *client(void *unused) {
    int fds[MOST], got[MOST], epoll = epoll_create1(0), last_round[MOST] = {0}, round = 0;
    long answers = 0;
    double asked[MOST], end = 0;
    char bytes[LENGTH] = "question";
    for (int at = 0; at < connections; at++) {
        fds[at] = socket(AF_INET, SOCK_STREAM, 0);
        set_nonblocking(fds[at]);
        if (connect(fds[at], (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) fail("connect");
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.u64 = at};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, fds[at], &event)) fail("EPOLL_CTL_ADD");
        got[at] = LENGTH;
        asked[at] = now();
    }
    /* Counted from the first answers on: before that the connections are made and moved to the NIC. */
    while (answers < 2 * connections || now() < end) {
        if (answers < 2 * connections) end = now() + seconds;
        struct epoll_event events[48];
        int count = epoll_wait(epoll, events, 48, 100);
        round++;
        for (int event = 0; event < count; event++) {
            int at = events[event].data.u64, fd = fds[at];
            if (last_round[at] == round) twice++;
            last_round[at] = round;
            if (got[at] == LENGTH && !(events[event].events & EPOLLOUT)) {
                outside++;
            } else if (got[at] < LENGTH && events[event].events & EPOLLIN) {
                ssize_t more = read(fd, bytes, LENGTH - got[at]);
                if (more < 0 && errno == EAGAIN) {
                    empty++;
                } else if (more <= 0) {
                    fail("read");
                } else if ((got[at] += more) == LENGTH) {
                    note_late(asked[at]);
                    requests++;
                    answers++;
                    modify(epoll, fd, at, EPOLLIN | EPOLLOUT);
                }
            } else if (events[event].events & EPOLLOUT) {
                if (got[at] < LENGTH) {
                    outside++;
                    continue;
                }
                got[at] = 0;
                asked[at] = now();
                if (write(fd, bytes, LENGTH) != LENGTH) fail("write");
                modify(epoll, fd, at, EPOLLIN);
            }
        }
    }
    return unused;
}

int main(int count, char **words) {
    if (count != 5) return 2;
    seconds = atof(words[2]), connections = atoi(words[3]), others = atoi(words[4]);
    one_shot = !strcmp(words[1], "oneshot");
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t length = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, MOST)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    if (!strcmp(words[1], "client")) {
        pthread_t threads[MOST];
        start(accept_all, (void *)(long)listener);
        for (int at = 0; at < others; at++) threads[at] = start(client, NULL);
        for (int at = 0; at < others; at++) pthread_join(threads[at], NULL);
    } else {
        churn(listener);
    }
    printf("requests %ld outside %ld twice %ld empty %ld late %ld\n", requests, outside, twice, empty, late);
    return 0;
}

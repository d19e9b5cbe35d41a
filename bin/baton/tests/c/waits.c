/* Threads in blocking calls on connections that move meanwhile. Usage: waits SECONDS SEED [PAIRS]
 *
 * Each connection is over loopback, both ends are here, and each end has three threads: one that sends, one that receives, one that
 * waits for the peer to close. Which call each of them blocks in is drawn at random. A call must return what it would return on a
 * connection that stays in the kernel: every byte in order, the end of the stream once the peer has shut its side, no error, and it must
 * return at all. Signals with a restarting handler come in between. Prints the number of connections; the first wrong result ends it. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FILE_BYTES (1 << 20)
#define PIECE 6000

enum { RECEIVER, SENDER, WATCHER, ROLES };

struct end {
    int fd;
    unsigned seed;
    unsigned sends, receives; /* seeds of the streams */
    size_t outgoing, incoming;
    int patient; /* its sender waits until the peer's has ended */
    int signals; /* its threads get signals */
    pthread_t threads[ROLES];
    _Atomic(const char *) doing[ROLES];
    atomic_size_t progress[ROLES];
    atomic_int over;
};

static unsigned char pattern[FILE_BYTES];
static int file;
static double seconds;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static unsigned draw(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void wrong(struct end *end, int role, const char *what, long got)
{
    int error = errno;
    fprintf(stderr, "%s: %s (%ld, errno %d %s) at byte %zu, descriptor %d\n", end->doing[role], what, got, error, strerror(error),
            (size_t)end->progress[role], end->fd);
    _exit(1);
}

#define CHECK(condition, what, got)                                                                                                  \
    do {                                                                                                                             \
        if (!(condition))                                                                                                            \
            wrong(end, role, what, got);                                                                                             \
    } while (0)

/* Waits until the descriptor is ready, in one of six ways. Fails if an event is reported that cannot be true. */
static void await(struct end *end, int role, int way, int epoll, short events)
{
    struct pollfd entry = {.fd = end->fd, .events = events};
    struct timespec long_time = {.tv_sec = 1000};
    struct epoll_event reported[4];
    fd_set set;
    int got;
    FD_ZERO(&set);
    FD_SET(end->fd, &set);
    do {
        switch (way) {
        case 0: end->doing[role] = "poll"; got = poll(&entry, 1, -1); break;
        case 1: end->doing[role] = "ppoll"; got = ppoll(&entry, 1, &long_time, NULL); break;
        case 2: end->doing[role] = "select"; got = select(end->fd + 1, &set, NULL, NULL, NULL); break;
        case 3: end->doing[role] = "pselect"; got = pselect(end->fd + 1, &set, NULL, NULL, &long_time, NULL); break;
        default: end->doing[role] = way == 4 ? "epoll_wait" : "epoll_wait, edges"; got = epoll_wait(epoll, reported, 4, -1); break;
        }
    } while (got < 0 && errno == EINTR);
    CHECK(got == 1, "what it returns", got);
    short seen = way < 2 ? entry.revents : way < 4 ? events : (short)reported[0].events;
    CHECK(seen && !(seen & (POLLERR | POLLNVAL)), "what it reports", seen);
}

static int set_for(struct end *end, int role, int way, unsigned events)
{
    if (way < 4)
        return -1;
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = events | (way == 5 ? EPOLLET : 0), .data.fd = end->fd};
    end->doing[role] = "epoll_ctl";
    CHECK(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, end->fd, &event) == 0, "what it returns", epoll);
    return epoll;
}

static void *receive(void *argument)
{
    struct end *end = argument;
    const int role = RECEIVER;
    unsigned random = end->seed;
    int way = draw(&random) % 14, flags = 0;
    int epoll = set_for(end, role, way, EPOLLIN);
    unsigned char buffer[PIECE];
    if (way == 6) {
        struct timeval limit = {.tv_usec = 3000};
        setsockopt(end->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    }
    int ready = 0;
    for (size_t done = 0;;) {
        size_t most = 1 + draw(&random) % PIECE;
        ssize_t got;
        struct iovec pieces[2] = {{buffer, most / 2}, {buffer + most / 2, most - most / 2}};
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
        struct mmsghdr messages[1] = {{.msg_hdr = message}};
        if (way < 6 && !ready)
            await(end, role, way, epoll, POLLIN);
        switch (way) {
        case 0: case 1: case 2: case 3: case 4: case 5:
            flags = MSG_DONTWAIT;
            got = recv(end->fd, buffer, most, flags);
            ready = way == 5 && !(got < 0 && errno == EAGAIN);
            if (way == 5 && got < 0 && errno == EAGAIN)
                continue;
            break;
        case 6:
            end->doing[role] = "recv with a time limit";
            got = recv(end->fd, buffer, most, 0);
            if (got < 0 && (errno == EAGAIN || errno == EINTR))
                continue;
            break;
        case 7: end->doing[role] = "read"; got = read(end->fd, buffer, most); break;
        case 8: end->doing[role] = "readv"; got = readv(end->fd, pieces, 2); break;
        case 9: end->doing[role] = "recvmsg"; got = recvmsg(end->fd, &message, 0); break;
        case 10:
            end->doing[role] = "recvmmsg";
            got = recvmmsg(end->fd, messages, 1, 0, NULL);
            got = got == 1 ? (ssize_t)messages[0].msg_len : got;
            break;
        case 11:
            end->doing[role] = "recv, all";
            got = recv(end->fd, buffer, most, MSG_WAITALL);
            size_t left = end->incoming - done;
            /* A signal interrupted the call. */
            CHECK(end->signals || got == (ssize_t)(left < most ? left : most), "not all", got);
            break;
        case 12:
            end->doing[role] = "recv, only looking";
            got = recv(end->fd, buffer, most, MSG_PEEK);
            CHECK(got >= 0, "what it returns", got);
            end->doing[role] = "recvfrom";
            got = recvfrom(end->fd, buffer, got ? (size_t)got : most, 0, NULL, NULL);
            break;
        default: end->doing[role] = "recv"; got = recv(end->fd, buffer, most, 0); break;
        }
        CHECK(got >= 0, "what it returns", got);
        if (got == 0) {
            CHECK(done == end->incoming, "an end too early", got);
            break;
        }
        CHECK(memcmp(buffer, pattern + (end->receives + done) % (FILE_BYTES / 2), got) == 0, "wrong bytes", got);
        done += got;
        CHECK(done <= end->incoming, "bytes too many", got);
        end->progress[role] = done;
    }
    end->doing[role] = NULL;
    if (epoll >= 0)
        close(epoll);
    end->over = 1;
    return NULL;
}

static void *send_all(void *argument)
{
    struct end *end = argument;
    const int role = SENDER;
    unsigned random = end->seed * 7 + 1;
    int way = draw(&random) % 9;
    int epoll = set_for(end, role, way, EPOLLOUT);
    int ready = 0;
    while (end->patient && !end->over)
        /* Waits: between two looks. */
        usleep(200);
    for (size_t done = 0; done < end->outgoing;) {
        size_t left = end->outgoing - done, most = 1 + draw(&random) % PIECE, at = (end->sends + done) % (FILE_BYTES / 2);
        most = most < left ? most : left;
        struct iovec pieces[2] = {{pattern + at, most / 2}, {pattern + at + most / 2, most - most / 2}};
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
        off_t offset = at;
        ssize_t sent;
        switch (way) {
        case 0: case 1: case 2: case 3: end->doing[role] = "send"; sent = send(end->fd, pattern + at, most, 0); break;
        case 4: case 5:
            if (!ready)
                await(end, role, way, epoll, POLLOUT);
            sent = send(end->fd, pattern + at, most, MSG_DONTWAIT);
            ready = way == 5 && !(sent < 0 && errno == EAGAIN);
            if (way == 5 && sent < 0 && errno == EAGAIN)
                continue;
            CHECK(sent > 0, "what send returns", sent);
            most = sent;
            break;
        case 6: end->doing[role] = "writev"; sent = writev(end->fd, pieces, 2); break;
        case 7: end->doing[role] = "sendmsg"; sent = sendmsg(end->fd, &message, 0); break;
        default:
            end->doing[role] = "sendfile";
            sent = sendfile(end->fd, file, &offset, most);
            if (sent > 0)
                most = sent; /* A signal interrupted the call. */
        }
        if (sent < 0 && errno == EINTR)
            continue;
        CHECK(sent > 0 && sent <= (ssize_t)most, "what it returns", sent);
        done += sent;
        end->progress[role] = done;
        if (draw(&random) % 8 == 0)
            /* Waits: other moments in each run; the result is the same. */
            usleep(draw(&random) % 300);
    }
    end->doing[role] = "shutdown";
    CHECK(shutdown(end->fd, SHUT_WR) == 0, "what it returns", -1);
    end->doing[role] = NULL;
    if (epoll >= 0)
        close(epoll);
    return NULL;
}

/* Waits for the peer to close its side; no other event may be reported. */
static void *watch(void *argument)
{
    struct end *end = argument;
    const int role = WATCHER;
    unsigned random = end->seed * 13 + 5;
    int ways[] = {0, 1, 4, 5}, way = ways[draw(&random) % 4];
    int epoll = set_for(end, role, way, EPOLLRDHUP);
    await(end, role, way, epoll, POLLRDHUP);
    end->doing[role] = NULL;
    if (epoll >= 0)
        close(epoll);
    return NULL;
}

static void nothing(int signal)
{
    (void)signal;
}

static void fill(struct end *end, int fd, unsigned *random)
{
    memset(end, 0, sizeof *end);
    end->fd = fd;
    end->seed = draw(random);
    end->outgoing = 1 + draw(random) % (draw(random) % 4 ? 300000 : 3000);
}

static void pair(struct end ends[2], unsigned *random)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, length) || listen(listener, 1) || getsockname(listener, (void *)&address, &length))
        perror("listening"), _exit(1);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(client, (void *)&address, length))
        perror("connect"), _exit(1);
    int server = accept(listener, NULL, NULL);
    if (server < 0)
        perror("accept"), _exit(1);
    close(listener);
    int fds[2] = {client, server}, patient = draw(random) % 6, signals = draw(random) % 2;
    for (int at = 0; at < 2; at++) {
        fill(&ends[at], fds[at], random);
        ends[at].patient = at == patient;
        ends[at].signals = signals;
    }
    for (int at = 0; at < 2; at++) {
        ends[at].sends = ends[!at].receives = draw(random) % (FILE_BYTES / 2);
        ends[!at].incoming = ends[at].outgoing;
    }
}

static unsigned long count;

static void *connections(void *argument)
{
    unsigned random = *(unsigned *)argument;
    double end = now() + seconds;
    static void *(*roles[])(void *) = {receive, send_all, watch};
    do {
        struct end ends[2];
        pair(ends, &random);
        for (int n = 0; n < 2 * ROLES; n++) {
            if (pthread_create(&ends[n / ROLES].threads[n % ROLES], NULL, roles[n % ROLES], &ends[n / ROLES]))
                perror("pthread_create"), _exit(1);
        }
        double patience = now() + 10;
        for (int n = 0; n < 2 * ROLES; n++) {
            for (;;) {
                struct timespec until;
                clock_gettime(CLOCK_REALTIME, &until);
                until.tv_nsec += 1000000 + draw(&random) % 4000000;
                until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
                if (pthread_timedjoin_np(ends[n / ROLES].threads[n % ROLES], NULL, &until) == 0)
                    break;
                if (ends[0].signals)
                    pthread_kill(ends[n / ROLES].threads[n % ROLES], SIGUSR1);
                if (now() > patience) {
                    for (int at = 0; at < 2 * ROLES; at++)
                        if (ends[at / ROLES].doing[at % ROLES])
                            fprintf(stderr, "%s hangs at byte %zu, descriptor %d\n", ends[at / ROLES].doing[at % ROLES],
                                    (size_t)ends[at / ROLES].progress[at % ROLES], ends[at / ROLES].fd);
                    _exit(2);
                }
            }
        }
        close(ends[0].fd);
        close(ends[1].fd);
        __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    } while (now() < end);
    return NULL;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    unsigned seed = argc > 2 ? strtoul(argv[2], NULL, 10) : 1, random = seed;
    seconds = argc > 1 ? strtod(argv[1], NULL) : 2;
    int pairs = argc > 3 ? atoi(argv[3]) : 3;
    for (int at = 0; at < FILE_BYTES / 2; at++)
        pattern[at] = pattern[at + FILE_BYTES / 2] = draw(&random);
    file = memfd_create("waits", MFD_CLOEXEC);
    if (file < 0 || write(file, pattern, FILE_BYTES) != FILE_BYTES)
        perror("memfd"), _exit(1);
    pthread_t threads[64];
    unsigned seeds[64];
    for (int at = 0; at < pairs && at < 64; at++) {
        seeds[at] = seed * 64 + at;
        pthread_create(&threads[at], NULL, connections, &seeds[at]);
    }
    for (int at = 0; at < pairs && at < 64; at++)
        pthread_join(threads[at], NULL);
    printf("%lu\n", count);
    return 0;
}

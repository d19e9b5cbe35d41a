/* Calls that depend on how many descriptors a program may have, or on how large the kernel's table of them is; and on how long they wait.
 *
 *     limits CASE [moved] */

#include "sockets.h"
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <time.h>

static void limit(rlim_t descriptors)
{
    struct rlimit most = {descriptors, descriptors};
    CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
}

/* As many descriptors as the system allows: 2^20, or fewer in a container. */
static void limit_highest(void)
{
    struct rlimit most = {1 << 20, 1 << 20};
    if (setrlimit(RLIMIT_NOFILE, &most) < 0) {
        CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0);
        limit(most.rlim_max);
    }
}

/* A connection, on the NIC if it is to move. */
static struct pair connected(int moved)
{
    struct pair pair = connect_pair();
    exchange(pair.client, pair.server, "the first\n");
    if (moved) {
        until_on_nic(pair.client);
        until_on_nic(pair.server);
    }
    return pair;
}

/* Entries of the kernel's table of this process's descriptors, each of 8 bytes. */
static int table(void)
{
    char line[200];
    int size = 0;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    while (fgets(line, sizeof line, status))
        sscanf(line, "FDSize: %d", &size);
    fclose(status);
    return size;
}

/* Memory that ends with a set, so that whoever reads on is ended. */
static fd_set *last_set(int bits)
{
    size_t page = sysconf(_SC_PAGESIZE), size = (bits < FD_SETSIZE ? FD_SETSIZE : bits) / 8;
    CHECK(size <= page);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory + page, page, PROT_NONE) == 0);
    return (fd_set *)(memory + page - size);
}

/* select with as many descriptors as there may be, as old servers call it: on sockets, and without any. */
static void whole_table(int moved)
{
    limit_highest();
    /* The table may be large from the start: whoever has forked this process had many descriptors. */
    fd_set *set = last_set(table());
    struct pair pair = connected(moved);
    int ends[2];
    CHECK(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    CHECK(write(pair.client, "x", 1) == 1);
    for (int sockets = 0; sockets < 2; sockets++) {
        struct timeval patience = {20, 0};
        int ready = 0;
        while (ready < sockets + 1) {
            FD_ZERO(set);
            FD_SET(ends[0], set);
            if (sockets)
                FD_SET(pair.server, set);
            CHECK((ready = select(getdtablesize(), set, NULL, NULL, &patience)) > 0);
        }
        CHECK(FD_ISSET(ends[0], set) && !FD_ISSET(pair.server, set) == !sockets);
    }
}

/* Everything from some number on is closed, a thousand times. */
static void close_from(int moved)
{
    limit_highest();
    /* Numbers up to 300 need a table of 512. It may be larger from the start, as above. */
    int most = table() > 1024 ? table() : 1024;
    struct pair pair = connected(moved);
    for (int round = 0; round < 1000; round++) {
        if (round % 100 == 0)
            CHECK(dup2(pair.server, 100) == 100 && dup2(0, 300) == 300);
        closefrom(50);
    }
    CHECK(fcntl(100, F_GETFD) < 0 && errno == EBADF && fcntl(300, F_GETFD) < 0 && errno == EBADF);
    CHECK(table() <= most);
    exchange(pair.client, pair.server, "the last\n");
}

/* poll with as many entries as there may be descriptors. */
static void whole_poll(int moved)
{
    enum { MOST = 256 };
    limit(MOST);
    struct pair pair = connected(moved);
    static struct pollfd entries[MOST + 1];
    for (int at = 0; at <= MOST; at++)
        entries[at].fd = -1;
    entries[7] = entries[MOST - 1] = (struct pollfd){.fd = pair.server, .events = POLLIN};
    entries[9] = (struct pollfd){.fd = pair.server, .events = POLLPRI};
    CHECK(poll(entries, MOST, 30) == 0);
    CHECK(ppoll(entries, MOST, &(struct timespec){0, 30000000}, NULL) == 0);
    CHECK(write(pair.client, "x", 1) == 1);
    CHECK(poll(entries, MOST, 20000) == 2);
    CHECK(entries[7].revents == POLLIN && entries[MOST - 1].revents == POLLIN && entries[9].revents == 0 && entries[8].revents == 0);
    CHECK(poll(entries, MOST + 1, 0) == -1 && errno == EINVAL);
    char byte;
    CHECK(read(pair.server, &byte, 1) == 1);
    CHECK(poll(entries, MOST + 1, 30) == -1 && errno == EINVAL);
}

static void *answer(void *end)
{
    char line[5];
    int fd = (long)end;
    while (recv(fd, line, sizeof line, MSG_WAITALL) == sizeof line)
        CHECK(send(fd, line, sizeof line, 0) == sizeof line);
    return NULL;
}

enum { PAIRS = 20 };

/* Connects them, and uses up the program's descriptors. */
static void use_all(struct pair *pairs, int moved)
{
    limit(128);
    for (int at = 0; at < PAIRS; at++)
        pairs[at] = connected(moved);
    while (dup(0) >= 0)
        ;
    CHECK(errno == EMFILE);
}

/* Has each thread answer fifty times, then end. */
static void ask_all(struct pair *pairs, pthread_t *threads)
{
    for (int round = 0; round < 50; round++) {
        char line[5];
        for (int at = 0; at < PAIRS; at++)
            CHECK(send(pairs[at].client, "line\n", 5, 0) == 5);
        for (int at = 0; at < PAIRS; at++)
            CHECK(recv(pairs[at].client, line, 5, MSG_WAITALL) == 5 && memcmp(line, "line\n", 5) == 0);
    }
    for (int at = 0; at < PAIRS; at++)
        CHECK(shutdown(pairs[at].client, SHUT_WR) == 0 && pthread_join(threads[at], NULL) == 0);
}

/* Threads sleep when the program has no descriptor left. */
static void none_left(int moved)
{
    struct pair pairs[PAIRS];
    pthread_t threads[PAIRS];
    use_all(pairs, moved);
    for (int at = 0; at < PAIRS; at++)
        CHECK(pthread_create(&threads[at], NULL, answer, (void *)(long)pairs[at].server) == 0);
    ask_all(pairs, threads);
}

struct watched {
    int fd, set;
};

/* As answer, where the thread waits in a set of its own. */
static void *answer_from_set(void *given)
{
    struct watched *watched = given;
    struct epoll_event event = {.events = EPOLLIN};
    char line[5];
    CHECK(epoll_ctl(watched->set, EPOLL_CTL_ADD, watched->fd, &event) == 0);
    for (;;) {
        CHECK(epoll_wait(watched->set, &event, 1, -1) == 1);
        if (recv(watched->fd, line, sizeof line, MSG_WAITALL) != sizeof line)
            return NULL;
        CHECK(send(watched->fd, line, sizeof line, 0) == sizeof line);
    }
}

/* Threads sleep in sets, to which their connections are added when the program has no descriptor left. */
static void none_for_sets(int moved)
{
    struct pair pairs[PAIRS];
    struct watched watched[PAIRS];
    for (int at = 0; at < PAIRS; at++)
        CHECK((watched[at].set = epoll_create1(0)) >= 0);
    use_all(pairs, moved);
    pthread_t threads[PAIRS];
    for (int at = 0; at < PAIRS; at++) {
        watched[at].fd = pairs[at].server;
        CHECK(pthread_create(&threads[at], NULL, answer_from_set, &watched[at]) == 0);
    }
    ask_all(pairs, threads);
}

static long microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000L + time.tv_nsec / 1000;
}

static int ascending(const void *one, const void *other)
{
    return (*(const long *)one > *(const long *)other) - (*(const long *)one < *(const long *)other);
}

/* Waits of 50 microseconds take no longer than a wait for nothing does, which is the kernel's own: the medians are compared. */
static void short_waits(int moved)
{
    enum { CALLS = 201, WAYS = 5 };
    static long times[WAYS][CALLS];
    struct pair pair = connected(moved);
    struct timespec limit = {.tv_nsec = 50000};
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(0);
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event) == 0);
    for (int at = 0; at < CALLS * WAYS; at++) {
        struct pollfd entry = {.fd = pair.server, .events = POLLIN};
        struct timeval time = {.tv_usec = 50};
        fd_set read;
        FD_ZERO(&read);
        FD_SET(pair.server, &read);
        long begun = microseconds(), got = -1;
        switch (at % WAYS) {
        case 0: got = ppoll(NULL, 0, &limit, NULL); break;
        case 1: got = ppoll(&entry, 1, &limit, NULL); break;
        case 2: got = pselect(pair.server + 1, &read, NULL, NULL, &limit, NULL); break;
        case 3: got = select(pair.server + 1, &read, NULL, NULL, &time); break;
        default: got = epoll_pwait2(set, &event, 1, &limit, NULL);
        }
        times[at % WAYS][at / WAYS] = microseconds() - begun;
        CHECK(got == 0);
    }
    for (int way = 0; way < WAYS; way++) {
        qsort(times[way], CALLS, sizeof(long), ascending);
        CHECK(times[way][CALLS / 2] >= 50 && times[way][CALLS / 2] < times[0][CALLS / 2] + 500);
    }
}

/* Sends a byte when nobody has been waiting for it for a while. */
static void *send_late(void *end)
{
    /* Waits: until the other thread sleeps, of which there is no event; one that has not slept yet finds the byte at once. */
    usleep(30000);
    CHECK(write((long)end, "x", 1) == 1);
    return NULL;
}

/* Waits for longer than any clock has numbers, which is for ever, end with what they wait for. */
static void longest_waits(int moved)
{
    enum { WAYS = 4 };
    struct pair pair = connected(moved);
    const struct timespec limit = {.tv_sec = LONG_MAX};
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(0);
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event) == 0);
    for (int way = 0; way < WAYS; way++) {
        struct pollfd entry = {.fd = pair.server, .events = POLLIN};
        struct timeval time = {.tv_sec = LONG_MAX};
        fd_set read_set;
        pthread_t sender;
        char byte;
        long got;
        FD_ZERO(&read_set);
        FD_SET(pair.server, &read_set);
        CHECK(pthread_create(&sender, NULL, send_late, (void *)(long)pair.client) == 0);
        switch (way) {
        case 0: got = ppoll(&entry, 1, &limit, NULL); break;
        case 1: got = pselect(pair.server + 1, &read_set, NULL, NULL, &limit, NULL); break;
        case 2: got = select(pair.server + 1, &read_set, NULL, NULL, &time); break;
        default: got = epoll_pwait2(set, &event, 1, &limit, NULL);
        }
        CHECK(got == 1);
        CHECK(read(pair.server, &byte, 1) == 1 && pthread_join(sender, NULL) == 0);
    }
}

int main(int count, char **words)
{
    static const struct {
        const char *name;
        void (*run)(int);
    } cases[] = {
        {"select", whole_table}, {"closefrom", close_from}, {"poll", whole_poll}, {"none left", none_left},
        {"none for sets", none_for_sets}, {"short waits", short_waits},
        {"longest waits", longest_waits},
    };
    alarm(STANDS_STILL);
    CHECK(count > 1);
    for (unsigned at = 0; at < sizeof cases / sizeof *cases; at++) {
        if (strcmp(cases[at].name, words[1]) == 0) {
            cases[at].run(count > 2 && strcmp(words[2], "moved") == 0);
            return 0;
        }
    }
    CHECK(!"such a case");
}

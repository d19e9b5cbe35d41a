/* Sets of epoll(7) that are watched themselves: by poll and select, and by other sets. Usage: nested CASE [moved]
 *
 * With "moving" in place of "moved" the connection moves all the time. */

#include "sockets.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>

static struct pair ends;
static int is_moving;
static char some[100];

static int new_set(void)
{
    int set = epoll_create1(0);
    CHECK(set >= 0);
    return set;
}

static void put(int set, int operation, int fd, unsigned events)
{
    struct epoll_event event = {.events = events, .data.u64 = 1000 + fd};
    CHECK(epoll_ctl(set, operation, fd, &event) == 0);
}

/* Whether a set reports this descriptor now, and nothing else. */
static int reports(int set, int fd)
{
    struct epoll_event events[4];
    int count = epoll_wait(set, events, 4, 0);
    CHECK(count == 0 || (count == 1 && events[0].data.u64 == 1000u + fd && events[0].events & EPOLLIN));
    return count;
}

/* Whether poll and select say that there is something to read; they agree. */
static int polls(int fd)
{
    struct pollfd entry = {.fd = fd, .events = POLLIN};
    struct timeval none = {0, 0};
    fd_set read;
    int count = poll(&entry, 1, 0);
    FD_ZERO(&read);
    FD_SET(fd, &read);
    CHECK(count >= 0 && entry.revents == (count ? POLLIN : 0));
    CHECK(select(fd + 1, &read, NULL, NULL, &none) == count && !!FD_ISSET(fd, &read) == count);
    return count;
}

/* Sends so many bytes, and waits until all that was sent has arrived. */
static void arrive(int count)
{
    int before, now = 0;
    CHECK(ioctl(ends.server, FIONREAD, &before) == 0);
    CHECK(write(ends.client, some, count) == count);
    while (now < before + count)
        CHECK(ioctl(ends.server, FIONREAD, &now) == 0);
}

static void take(int count)
{
    CHECK(recv(ends.server, some, count, MSG_WAITALL) == count);
}

static void is_polled(void)
{
    int set = new_set();
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    CHECK(!reports(set, ends.server));
    arrive(2);
    CHECK(reports(set, ends.server) && polls(set) && polls(set) && reports(set, ends.server));
    take(1);
    CHECK(polls(set) && reports(set, ends.server));
    take(1);
    CHECK(!polls(set) && !reports(set, ends.server) && !polls(set));
    arrive(1);
    CHECK(polls(set));
    CHECK(reports(set, ends.server));
    put(set, EPOLL_CTL_MOD, ends.server, 0);
    CHECK(!polls(set) && !reports(set, ends.server));
    put(set, EPOLL_CTL_MOD, ends.server, EPOLLIN);
    CHECK(polls(set));
    CHECK(epoll_ctl(set, EPOLL_CTL_DEL, ends.server, NULL) == 0 && !polls(set));
    take(1);
    close(set);
}

/* What the inner registration reports once makes the set readable until then. */
static void edges_inside(unsigned how)
{
    int set = new_set(), outer = new_set();
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN | how);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN);
    CHECK(!polls(set) && !polls(outer));
    arrive(1);
    CHECK(polls(set) && polls(outer) && reports(outer, set) && reports(outer, set));
    CHECK(reports(set, ends.server) && !reports(set, ends.server));
    CHECK(!polls(set) && !polls(outer) && !reports(outer, set));
    arrive(1);
    if (how == EPOLLONESHOT) {
        CHECK(!polls(set) && !reports(outer, set));
        put(set, EPOLL_CTL_MOD, ends.server, EPOLLIN | how);
    }
    CHECK(polls(set) && reports(outer, set));
    take(2);
    CHECK(!polls(set) && !reports(outer, set) && !reports(set, ends.server));
    close(set);
    close(outer);
}

static void levels(void)
{
    int set = new_set(), outer = new_set();
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN);
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    CHECK(!reports(outer, set));
    arrive(2);
    CHECK(reports(outer, set) && reports(outer, set) && reports(set, ends.server) && reports(outer, set));
    take(1);
    CHECK(reports(outer, set));
    take(1);
    CHECK(!reports(outer, set));
    arrive(1);
    CHECK(reports(outer, set));
    take(1);
    CHECK(!reports(outer, set) && !reports(set, ends.server));
    close(set);
    close(outer);
}

static void edges(void)
{
    int set = new_set(), outer = new_set(), pipes[2];
    CHECK(pipe(pipes) == 0);
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN | EPOLLET);
    CHECK(!reports(outer, set));
    arrive(1);
    CHECK(reports(outer, set) && !reports(outer, set));
    arrive(2);
    CHECK(reports(outer, set) && !reports(outer, set));
    CHECK(reports(set, ends.server) && !reports(outer, set));
    take(1);
    CHECK(reports(set, ends.server) && !reports(outer, set));
    put(outer, EPOLL_CTL_MOD, set, EPOLLIN | EPOLLET);
    CHECK(reports(outer, set) && !reports(outer, set));
    take(2);
    CHECK(!reports(outer, set));
    put(set, EPOLL_CTL_ADD, pipes[0], EPOLLIN);
    CHECK(write(pipes[1], "p", 1) == 1);
    CHECK(reports(outer, set) && !reports(outer, set));
    CHECK(reports(set, pipes[0]) && read(pipes[0], some, 1) == 1 && !reports(outer, set));
    arrive(1);
    CHECK(reports(outer, set) && !reports(outer, set));
    CHECK(write(pipes[1], "p", 1) == 1);
    CHECK(reports(outer, set) && !reports(outer, set));
    take(1);
    close(set), close(outer), close(pipes[0]), close(pipes[1]);
}

static void one_shots(void)
{
    int set = new_set(), outer = new_set();
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN | EPOLLONESHOT);
    for (int round = 0; round < 3; round++) {
        CHECK(!reports(outer, set));
        arrive(1);
        CHECK(reports(outer, set) && !reports(outer, set));
        arrive(1);
        CHECK(!reports(outer, set));
        put(outer, EPOLL_CTL_MOD, set, EPOLLIN | EPOLLONESHOT);
        CHECK(reports(outer, set) && !reports(outer, set));
        take(2);
        put(outer, EPOLL_CTL_MOD, set, EPOLLIN | EPOLLONESHOT);
    }
    close(set);
    close(outer);
}

/* How: of the outermost set's registration. */
static void two_deep(unsigned how)
{
    int set = new_set(), between = new_set(), outer = new_set(), again = how != EPOLLET;
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    put(outer, EPOLL_CTL_ADD, between, EPOLLIN | how);
    put(between, EPOLL_CTL_ADD, set, EPOLLIN);
    CHECK(!polls(outer) && !reports(outer, between));
    for (int round = 0; round < 3; round++) {
        arrive(1);
        CHECK(reports(outer, between) && reports(outer, between) == again);
        CHECK(reports(between, set) && reports(set, ends.server) && polls(between) && polls(set) && polls(outer) == again);
        take(1);
        CHECK(!reports(outer, between) && !reports(between, set) && !reports(set, ends.server) && !polls(outer));
    }
    close(set);
    CHECK(!reports(outer, between));
    close(between);
    close(outer);
}

/* What is ready before it is added, at each level. */
static void is_added_late(void)
{
    int set = new_set(), outer = new_set();
    arrive(1);
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN | EPOLLET);
    CHECK(reports(outer, set) && !reports(outer, set));
    CHECK(epoll_ctl(outer, EPOLL_CTL_DEL, set, NULL) == 0 && !reports(outer, set));
    CHECK(epoll_ctl(set, EPOLL_CTL_DEL, ends.server, NULL) == 0);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN);
    CHECK(!reports(outer, set));
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN | EPOLLET);
    CHECK(reports(outer, set) && reports(outer, set) && reports(set, ends.server) && !reports(outer, set));
    take(1);
    close(set);
    close(outer);
}

/* Sets that are closed, and numbers that others get. */
static void are_closed(void)
{
    int set = new_set(), outer = new_set(), copy = dup(set);
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    put(outer, EPOLL_CTL_ADD, set, EPOLLIN);
    arrive(1);
    CHECK(close(set) == 0 && reports(outer, set) && polls(copy));
    int other = new_set();
    CHECK(other == set && reports(outer, set));
    CHECK(close(copy) == 0 && !reports(outer, set) && !polls(outer));
    put(outer, EPOLL_CTL_ADD, other, EPOLLIN);
    CHECK(!reports(outer, other));
    put(other, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    CHECK(reports(outer, other));
    take(1);
    CHECK(!reports(outer, other) && epoll_ctl(outer, EPOLL_CTL_DEL, other, NULL) == 0);
    arrive(1);
    CHECK(!reports(outer, other));
    take(1);
    close(other);
    close(outer);
}

static int watched, how_to_wait;
static volatile int sleeper, returned;

static void *waits(void *unused)
{
    struct epoll_event event;
    struct pollfd entry = {.fd = watched, .events = POLLIN};
    fd_set read;
    FD_ZERO(&read);
    FD_SET(watched, &read);
    sleeper = syscall(SYS_gettid);
    switch (how_to_wait) {
    case 0: CHECK(poll(&entry, 1, -1) == 1 && entry.revents == POLLIN); break;
    case 1: CHECK(select(watched + 1, &read, NULL, NULL, NULL) == 1); break;
    default: CHECK(epoll_wait(watched, &event, 1, -1) == 1 && event.events == EPOLLIN);
    }
    returned = 1;
    return unused;
}

/* Waits until the thread is seen to sleep, so many times, or has returned from its call. */
static void until_asleep(int times)
{
    char path[64], text[512];
    for (int seen = 0; seen < times && !returned;) {
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper);
        FILE *file = fopen(path, "r");
        size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
        text[length] = 0;
        char *end = strrchr(text, ')');
        seen += end && end[2] == 'S';
        if (file)
            fclose(file);
        sched_yield();
    }
}

/* Threads that sleep for a set, or for one that it is in, are woken by what arrives, and by nothing else. */
static void are_slept_for(void)
{
    for (int round = 0; round < 12; round++) {
        int set = new_set(), outer = new_set(), deep = round % 6 >= 3;
        pthread_t thread;
        put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
        put(outer, EPOLL_CTL_ADD, set, EPOLLIN | (round % 4 ? 0 : EPOLLET));
        watched = deep ? outer : set, how_to_wait = round % 3, sleeper = returned = 0;
        CHECK(pthread_create(&thread, NULL, waits, NULL) == 0);
        while (!sleeper)
            sched_yield();
        until_asleep(20);
        CHECK(!returned);
        arrive(1);
        CHECK(pthread_join(thread, NULL) == 0);
        /* A look that may not wait does not wait for a move for ever either. */
        CHECK(is_moving || (reports(set, ends.server) && polls(set)));
        take(1);
        CHECK(!polls(set) && !reports(set, ends.server) && !reports(outer, set));
        close(set);
        close(outer);
    }
}

/* A set is passed on, and so another process's, too, for which this one stands: it gets the program's own data by either descriptor, also
 * of what is added later. */
static void is_passed_on(void)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
    struct iovec byte = {some, 1};
    struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    void *number = CMSG_DATA(CMSG_FIRSTHDR(&message));
    int set = new_set(), passed, way[2];
    put(set, EPOLL_CTL_ADD, ends.server, EPOLLIN);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, way) == 0);
    memcpy(number, &set, sizeof set);
    CHECK(sendmsg(way[0], &message, 0) == 1 && recvmsg(way[1], &message, 0) == 1);
    memcpy(&passed, number, sizeof passed);
    CHECK(!reports(passed, ends.server) && !reports(set, ends.server));
    arrive(1);
    CHECK(reports(passed, ends.server) && reports(set, ends.server));
    take(1);
    put(set, EPOLL_CTL_ADD, ends.client, EPOLLIN);
    CHECK(write(ends.server, some, 1) == 1);
    while (!reports(passed, ends.client))
        sched_yield();
    CHECK(reports(set, ends.client) && read(ends.client, some, 1) == 1);
    close(set), close(passed), close(way[0]), close(way[1]);
}

int main(int count, char **words)
{
    CHECK(count >= 2);
    alarm(STANDS_STILL);
    ends = connect_pair();
    exchange(ends.client, ends.server, "hello\n");
    exchange(ends.server, ends.client, "hello\n");
    is_moving = count > 2 && strcmp(words[2], "moving") == 0;
    if (count > 2 && !is_moving)
        exchange_until_on_nic(ends, ends.server), exchange_until_on_nic(ends, ends.client);
    const char *name = words[1];
    int rounds = strcmp(name, "asleep") == 0 ? 4 : 100;
    for (int round = 0; round < (is_moving ? rounds : 1); round++) {
        if (strcmp(name, "polled") == 0) is_polled();
        else if (strcmp(name, "edge inside") == 0) edges_inside(EPOLLET);
        else if (strcmp(name, "one shot inside") == 0) edges_inside(EPOLLONESHOT);
        else if (strcmp(name, "level") == 0) levels();
        else if (strcmp(name, "edge") == 0) edges();
        else if (strcmp(name, "one shot") == 0) one_shots();
        else if (strcmp(name, "two deep") == 0) two_deep(0);
        else if (strcmp(name, "two deep, edge") == 0) two_deep(EPOLLET);
        else if (strcmp(name, "added late") == 0) is_added_late();
        else if (strcmp(name, "closed") == 0) are_closed();
        else if (strcmp(name, "asleep") == 0) are_slept_for();
        else if (strcmp(name, "passed on") == 0) is_passed_on();
        else CHECK(!"such a case");
    }
    return 0;
}

/* With SO_LINGER the last close of a socket waits until the peer has acknowledged everything, or, with a time of 0, resets the connection
 * before it returns. Usage: linger CASE [moved] */

#include "sockets.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define ROUNDS 5

static struct pair ends;
static int moved;
static atomic_int reads;
static atomic_size_t received;

static void set_linger(int fd, int seconds)
{
    struct linger linger = {.l_onoff = 1, .l_linger = seconds};
    CHECK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
}

/* The peer, which reads nothing at first. */
static void *read_late(void *unused)
{
    static char bytes[65536];
    ssize_t got;
    /* Waits: so that a close that does not linger returns before this ends. */
    nanosleep(&(struct timespec){0, 200000000}, NULL);
    reads = 1;
    while ((got = read(ends.client, bytes, sizeof bytes)) > 0)
        received += got;
    CHECK(got == 0);
    return unused;
}

static size_t fill(int fd)
{
    static char bytes[65536];
    size_t sent = 0;
    ssize_t more;
    CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
    while ((more = write(fd, bytes, sizeof bytes)) > 0)
        sent += more;
    CHECK(errno == EAGAIN);
    return sent;
}

static void by_close(int fd)
{
    CHECK(close(fd) == 0);
}

static void by_dup2(int fd)
{
    int other = open("/dev/null", O_RDONLY);
    CHECK(dup2(other, fd) == fd && close(other) == 0 && close(fd) == 0);
}

static void by_close_range(int fd)
{
    CHECK(close_range(fd, fd, 0) == 0);
}

static void (*const ways[])(int) = {by_close, by_dup2, by_close_range};

static void waits(void)
{
    for (int at = 0; at < 3; at++) {
        pthread_t peer;
        ends = connect_used(moved);
        set_linger(ends.server, 40);
        size_t sent = fill(ends.server);
        reads = received = 0;
        CHECK(pthread_create(&peer, NULL, read_late, NULL) == 0);
        ways[at](ends.server);
        CHECK(reads);
        CHECK(pthread_join(peer, NULL) == 0 && received == sent);
        close(ends.client);
    }
}

/* Once close has returned the port is free: another socket gets it, without SO_REUSEADDR. */
static void resets(void)
{
    for (int at = 0; at < 3 * ROUNDS; at++) {
        struct sockaddr_in name;
        socklen_t length = sizeof name;
        ends = connect_used(moved);
        set_linger(ends.client, 0);
        CHECK(getsockname(ends.client, (struct sockaddr *)&name, &length) == 0);
        ways[at % 3](ends.client);
        int next = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(bind(next, (struct sockaddr *)&name, length) == 0);
        close(next);
        CHECK(read(ends.server, &name, 1) == -1 && errno == ECONNRESET);
        close(ends.server);
    }
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {{"waits", waits}, {"resets", resets}};
    alarm(STANDS_STILL);
    CHECK(count >= 2);
    moved = count > 2 && strcmp(arguments[2], "moved") == 0;
    return run_case(cases, sizeof cases / sizeof cases[0], arguments[1]);
}

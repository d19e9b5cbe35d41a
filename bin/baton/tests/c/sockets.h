/* What the programs of these tests share: connections over loopback, and a way to wait until the NIC has one.
 *
 * A program that stands still is ended by SIGALRM. With "moved" as its last argument it waits until its connection is on the NIC. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Seconds after which a program that stands still is ended: far more than it needs beside whatever else the machine does. */
#define STANDS_STILL 300

#define CHECK(what) \
    do { \
        if (!(what)) { \
            int number = errno; \
            char line[200]; \
            int length = snprintf(line, sizeof line, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #what, strerror(number)); \
            syscall(SYS_write, 2, line, length); \
            _exit(1); \
        } \
    } while (0)

/* Ends of connections: accepted, connected. */
struct pair {
    int server, client;
};

static inline struct pair connect_pair(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 16) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    struct pair made = {-1, socket(AF_INET, SOCK_STREAM, 0)};
    CHECK(connect(made.client, (struct sockaddr *)&address, length) == 0);
    CHECK((made.server = accept(listener, NULL, NULL)) >= 0);
    close(listener);
    return made;
}

/* Whether the kernel's socket is only the shell of a connection on the NIC: it is in repair mode then. The system call is made here, since
 * the library answers getsockopt itself. */
static inline int is_on_nic(int fd)
{
    int repair = 0;
    socklen_t length = sizeof repair;
    long done;
    register long level __asm__("r10") = (long)&repair;
    register long size __asm__("r8") = (long)&length;
    __asm__ volatile("syscall" : "=a"(done) : "a"(SYS_getsockopt), "D"((long)fd), "S"(6L), "d"((long)TCP_REPAIR), "r"(level), "r"(size)
                     : "rcx", "r11", "memory");
    return done == 0 && repair == 1;
}

static inline void until_on_nic(int fd)
{
    while (!is_on_nic(fd))
        sched_yield();
}

/* Sends a line and receives it at the other end. */
static inline void exchange(int from, int to, const char *line)
{
    char got[200];
    size_t length = strlen(line), have = 0;
    CHECK(write(from, line, length) == (ssize_t)length);
    while (have < length) {
        ssize_t more = read(to, got + have, length - have);
        CHECK(more > 0);
        have += more;
    }
    CHECK(memcmp(got, line, length) == 0);
}

/* Leaves the processor to others between two looks. */
static inline void nap(void)
{
    /* Waits: for what no event shows. */
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* Exchanges lines until this end of the connection is on the NIC. */
static inline void exchange_until_on_nic(struct pair pair, int fd)
{
    do {
        exchange(pair.client, pair.server, "once more\n");
        nap();
    } while (!is_on_nic(fd));
}

/* A connection that has been used both ways. With `moved` the server's end is on the NIC. */
static inline struct pair connect_used(int moved)
{
    struct pair made = connect_pair();
    exchange(made.client, made.server, "there\n");
    exchange(made.server, made.client, "back\n");
    if (moved)
        until_on_nic(made.server);
    return made;
}

/* A case of a program, by the name that is its first argument. */
struct test_case {
    const char *name;
    void (*run)(void);
};

static inline int run_case(const struct test_case *cases, size_t count, const char *name)
{
    for (size_t at = 0; at < count; at++)
        if (strcmp(cases[at].name, name) == 0)
            return cases[at].run(), 0;
    CHECK(!"such a case");
}

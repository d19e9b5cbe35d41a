/* A server with a thread for each connection, and the clients of these: connections that end in one of several ways, all at about the
 * same moment, so that many threads have something to ask of their agent at once. Every byte is checked. The two are one program:
 *
 *     ends HOW PORT CONNECTIONS SEED             serves: prints a line when it listens
 *     ends HOW PORT CONNECTIONS SEED ADDRESS     connects
 *
 * HOW is how the server ends a connection, after a random pause of up to 40 ms:
 *
 *     close         sends, then closes; the kernel or the NIC has most of it still
 *     small         the same with some bytes only
 *     linger        the same with SO_LINGER: the close waits until all is acknowledged
 *     half-server   sends, shuts its sending half down, reads to the end and closes; the client sends meanwhile
 *     half-client   reads to the end, then sends and closes
 *     kill          fills the connection's queue and is killed (SIGKILL) once every thread has done so
 *
 * A server prints a line of JSON when a connection is done, a client one when it has read to the end: the connection's number, bytes sent
 * and received, what is wrong with the first that is, and how it ended ("end", or the name of an error).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PIECE = 32768, MUCH = 2000000, SOME = 1000000, PAUSE_US = 40000, PATIENCE_MS = 10000 };

struct link {
    pthread_t thread;
    int fd;
    uint32_t number;
    uint64_t sent, received;
    char wrong[200], end[100];
};

static const char *how;
static unsigned seed;
static int serves;
static pthread_barrier_t all_full;

static int is(const char *name) { return strcmp(how, name) == 0; }

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Bytes of a direction of a connection, from an offset on: words that name the connection, the direction and their own place. `piece` has
 * room for two words more. */
static char *fill(char *piece, uint32_t number, int by_server, uint64_t from, size_t length) {
    size_t skip = from % 8;
    for (size_t at = 0; at < length + skip; at += 8) {
        uint64_t word = (uint64_t)number << 40 | (uint64_t)by_server << 39 | (from + at) / 8;
        memcpy(piece + at, &word, 8);
    }
    return piece + skip;
}

/* Sends `length` bytes, or as many as fit if it must not wait. */
static void put(struct link *link, uint64_t length, int flags) {
    char piece[PIECE + 16];
    while (link->sent < length) {
        size_t some = length - link->sent < PIECE ? length - link->sent : PIECE;
        ssize_t done = send(link->fd, fill(piece, link->number, serves, link->sent, some), some, flags | MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && errno == EAGAIN && (flags & MSG_DONTWAIT)) return;
        if (done < 0) {
            snprintf(link->end, sizeof link->end, "%s in send", strerrorname_np(errno));
            return;
        }
        link->sent += (uint64_t)done;
    }
}

static void verify(struct link *link, const char *piece, size_t length) {
    char right[PIECE + 16];
    const char *wanted = fill(right, link->number, !serves, link->received, length);
    if (memcmp(piece, wanted, length) != 0 && link->wrong[0] == 0) {
        size_t at = 0;
        while (piece[at] == wanted[at]) at++;
        /* The first whole word says whose byte it may be. */
        uint64_t word = 0;
        size_t begins = at + (8 - (link->received + at) % 8) % 8;
        if (begins + 8 <= length) memcpy(&word, piece + begins, 8);
        snprintf(link->wrong, sizeof link->wrong, "at %lu of %lu: connection %lu, word %#lx", link->received + at, link->received + length,
                 (unsigned long)(word >> 40), (unsigned long)(word & 0xffffffffff));
    }
    link->received += length;
}

static void get_all(struct link *link) {
    char piece[PIECE];
    for (;;) {
        if (!serves) {
            struct pollfd readable = {link->fd, POLLIN, 0};
            if (poll(&readable, 1, PATIENCE_MS) == 0) {
                strcpy(link->end, "stuck");
                return;
            }
        }
        ssize_t done = recv(link->fd, piece, PIECE, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) snprintf(link->end, sizeof link->end, "%s in recv", strerrorname_np(errno));
        if (done <= 0) return;
        verify(link, piece, (size_t)done);
    }
}

static void half_close(struct link *link) {
    if (shutdown(link->fd, SHUT_WR) != 0) snprintf(link->end, sizeof link->end, "%s in shutdown", strerrorname_np(errno));
}

/* One write, so that it is there although the process is killed. */
static void say(const struct link *link) {
    char line[600];
    int length = snprintf(line, sizeof line, "{\"number\": %u, \"sent\": %lu, \"received\": %lu, \"wrong\": \"%s\", \"end\": \"%s\"}\n", link->number,
                          link->sent, link->received, link->wrong, link->end);
    if (write(STDOUT_FILENO, line, (size_t)length) != length) fail("write");
}

static void *serve(void *given) {
    struct link *link = given;
    strcpy(link->end, "end");
    for (size_t got = 0; got < sizeof link->number;) {
        ssize_t done = recv(link->fd, (char *)&link->number + got, sizeof link->number - got, 0);
        if (done <= 0) {
            snprintf(link->end, sizeof link->end, "%s before the number", done == 0 ? "end" : strerrorname_np(errno));
            say(link);
            return NULL;
        }
        got += (size_t)done;
    }
    unsigned chance = seed * 7919 + link->number;
    /* Waits: the connections end one shortly after the other, in another order each time. */
    usleep((useconds_t)(rand_r(&chance) % PAUSE_US));
    if (is("kill")) {
        put(link, UINT64_MAX, MSG_DONTWAIT);
        say(link);
        pthread_barrier_wait(&all_full);
        for (;;) pause();
    }
    struct linger wait = {1, 30};
    if (is("linger")) setsockopt(link->fd, SOL_SOCKET, SO_LINGER, &wait, sizeof wait);
    if (is("half-client")) get_all(link);
    put(link, (is("small") ? 1 : MUCH) + link->number, 0);
    if (is("half-server")) {
        half_close(link);
        get_all(link);
    }
    if (close(link->fd) != 0) snprintf(link->end, sizeof link->end, "%s in close", strerrorname_np(errno));
    say(link);
    return NULL;
}

static void *put_and_half_close(void *given) {
    put(given, SOME + ((struct link *)given)->number, 0);
    half_close(given);
    return NULL;
}

static void *ask(void *given) {
    struct link *link = given;
    strcpy(link->end, "end");
    if (send(link->fd, &link->number, sizeof link->number, MSG_NOSIGNAL) != sizeof link->number) fail("send");
    if (is("half-client")) put_and_half_close(link);
    pthread_t sender;
    int both = is("half-server");
    if (both && pthread_create(&sender, NULL, put_and_half_close, link) != 0) fail("pthread_create");
    get_all(link);
    if (both) pthread_join(sender, NULL);
    close(link->fd);
    say(link);
    return NULL;
}

int main(int count, char **arguments) {
    if (count != 5 && count != 6) {
        fprintf(stderr, "usage: ends HOW PORT CONNECTIONS SEED [ADDRESS]\n");
        return 2;
    }
    how = arguments[1];
    seed = (unsigned)atoi(arguments[4]);
    serves = count == 5;
    unsigned connections = (unsigned)atoi(arguments[3]);
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(arguments[2])), .sin_addr.s_addr = htonl(INADDR_ANY)};
    if (!serves && inet_pton(AF_INET, arguments[5], &where.sin_addr) != 1) fail("address");
    struct link *links = calloc(connections, sizeof *links);
    if (links == NULL || pthread_barrier_init(&all_full, NULL, connections + 1) != 0) fail("memory");
    int listener = -1, one = 1;
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (listener < 0) fail("socket");
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&where, sizeof where) != 0 || listen(listener, 4096) != 0) fail("listen");
        puts("listening");
        fflush(stdout);
    }
    for (unsigned number = 0; number < connections; number++) {
        struct link *link = &links[number];
        link->number = number;
        link->fd = serves ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (link->fd < 0 || (!serves && connect(link->fd, (struct sockaddr *)&where, sizeof where) != 0)) fail(serves ? "accept" : "connect");
        if (pthread_create(&link->thread, NULL, serves ? serve : ask, link) != 0) fail("pthread_create");
    }
    if (serves && is("kill")) {
        pthread_barrier_wait(&all_full);
        kill(getpid(), SIGKILL);
    }
    for (unsigned number = 0; number < connections; number++) pthread_join(links[number].thread, NULL);
    return 0;
}

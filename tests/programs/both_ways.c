/* A program with many connections, each with a thread of its own that keeps it full in both directions: numbered words are sent for a
 * while, then the sending half is closed, and what comes is read to its end. Every word is checked. The two ends are the same program:
 *
 *     both_ways PORT CONNECTIONS SECONDS PATIENCE            serves: prints a line when it listens
 *     both_ways PORT CONNECTIONS SECONDS PATIENCE ADDRESS    connects
 *
 * Prints one line of JSON for each connection: its number (the client's; -1 if the server never learned it), bytes sent and received,
 * the longest time without any progress and when it began, in milliseconds, and how often its thread has polled meanwhile (once: the
 * thread itself stood still); wrong pieces and what is in the first; and how it ended: "done", the name of an error, or "stuck" after
 * PATIENCE seconds without progress, with what poll(2) and a receive say then.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 16384 };

struct link {
    pthread_t thread;
    int fd;
    long number;
    uint64_t sent, received, wrong, first;
    double longest, when;
    long looks, looked;
    char end[200], first_wrong[400];
};

static double seconds, patience;

/* No connection talks before all are made: one that has to wait until this program's first thread gets a processor, to connect or accept
 * it, would seem to stand still. */
static pthread_barrier_t all_made;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

/* Bytes of the stream of a connection, from an offset on: words of its number and their own. `piece` has room for two words more. */
static char *fill(char *piece, long number, uint64_t from, size_t length) {
    size_t skip = from % 8;
    for (size_t at = 0; at < length + skip; at += 8) {
        uint64_t word = (uint64_t)number << 40 | (from + at) / 8;
        memcpy(piece + at, &word, 8);
    }
    return piece + skip;
}

/* The stream's first word says which connection it is. */
static void verify(struct link *link, const char *piece, size_t length, char *scratch) {
    if (link->received < 8) {
        size_t some = length < 8 - link->received ? length : 8 - link->received;
        memcpy((char *)&link->first + link->received, piece, some);
        link->received += some;
        piece += some;
        length -= some;
        if (link->received == 8) {
            long number = (long)(link->first >> 40);
            link->wrong += (link->number >= 0 && link->number != number) || (link->first & 0xffffffffff) != 0;
            link->number = number;
        }
    }
    const char *right = fill(scratch, link->number, link->received, length);
    if (length > 0 && memcmp(piece, right, length) != 0) {
        size_t at = 0;
        while (piece[at] == right[at]) at++;
        if (link->wrong++ == 0) {
            /* What is there instead: for each run of words its place in the stream, the connection and the first word. */
            size_t begins = (8 - link->received % 8) % 8, used = 0;
            uint64_t expected = 0;
            used += (size_t)snprintf(link->first_wrong, sizeof link->first_wrong, "at %lu of %lu+%lu:", link->received + at, link->received, length);
            for (size_t word = begins; word + 8 <= length; word += 8, expected++) {
                uint64_t found;
                memcpy(&found, piece + word, 8);
                if ((word == begins || found != expected) && used + 60 < sizeof link->first_wrong) {
                    used += (size_t)snprintf(link->first_wrong + used, sizeof link->first_wrong - used, " %lu=%lu.%lu", link->received + word,
                                             (unsigned long)(found >> 40), (unsigned long)(found & 0xffffffffff));
                }
                expected = found;
            }
        }
    }
    link->received += length;
}

static void *talk(void *given) {
    struct link *link = given;
    static const double turn = 0.25;
    char *out = malloc(PIECE + 16), *in = malloc(PIECE);
    pthread_barrier_wait(&all_made);
    double begin = now(), last = begin;
    int sending = 1, receiving = 1;
    if (out == NULL || in == NULL) fail("malloc");
    strcpy(link->end, "done");
    while (sending || receiving) {
        /* A server does not know the number of a connection before its first word. */
        int may_send = sending && link->number >= 0;
        struct pollfd poll_for = {link->fd, (short)((receiving ? POLLIN : 0) | (may_send ? POLLOUT : 0)), 0};
        int ready = poll(&poll_for, 1, (int)(turn * 1000));
        double at = now();
        int progress = 0;
        if (ready < 0 && errno != EINTR) fail("poll");
        if (receiving && (poll_for.revents & (POLLIN | POLLERR | POLLHUP))) {
            ssize_t got = recv(link->fd, in, PIECE, 0);
            if (got > 0) {
                verify(link, in, (size_t)got, out);
                progress = 1;
            } else if (got == 0) {
                receiving = 0;
                progress = 1;
            } else if (errno != EAGAIN && errno != EINTR) {
                snprintf(link->end, sizeof link->end, "%s in recv", strerrorname_np(errno));
                break;
            }
        }
        if (may_send && (poll_for.revents & (POLLOUT | POLLERR | POLLHUP))) {
            size_t length = PIECE;
            int last_one = at - begin >= seconds;
            if (last_one) length = 8 - link->sent % 8;
            ssize_t put = send(link->fd, fill(out, link->number, link->sent, length), length, MSG_NOSIGNAL);
            if (put > 0) {
                link->sent += (uint64_t)put;
                progress = 1;
            } else if (put < 0 && errno != EAGAIN && errno != EINTR) {
                snprintf(link->end, sizeof link->end, "%s in send", strerrorname_np(errno));
                break;
            }
            if (last_one && put == (ssize_t)length) {
                sending = 0;
                if (shutdown(link->fd, SHUT_WR) != 0) {
                    snprintf(link->end, sizeof link->end, "%s in shutdown", strerrorname_np(errno));
                    break;
                }
            }
        }
        link->looks++;
        if (at - last > link->longest) {
            link->longest = at - last;
            link->when = last - begin;
            link->looked = link->looks;
        }
        if (progress) {
            last = at;
            link->looks = 0;
        } else if (at - last > patience) {
            struct pollfd all = {link->fd, POLLIN | POLLOUT | POLLRDHUP, 0};
            poll(&all, 1, 0);
            ssize_t got = recv(link->fd, in, PIECE, MSG_DONTWAIT | MSG_PEEK);
            snprintf(link->end, sizeof link->end, "stuck%s%s, poll %#x, recv %s", sending ? " sending" : "", receiving ? " receiving" : "",
                     all.revents, got > 0 ? "data" : got == 0 ? "end" : strerrorname_np(errno));
            break;
        }
    }
    close(link->fd);
    free(out);
    free(in);
    return NULL;
}

static void start(struct link *link) {
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 256 << 10);
    int error = pthread_create(&link->thread, &small, talk, link);
    if (error != 0) {
        errno = error;
        fail("pthread_create");
    }
}

int main(int count, char **arguments) {
    if (count != 5 && count != 6) {
        fprintf(stderr, "usage: both_ways PORT CONNECTIONS SECONDS PATIENCE [ADDRESS]\n");
        return 2;
    }
    long connections = atol(arguments[2]);
    seconds = atof(arguments[3]);
    patience = atof(arguments[4]);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct link *links = calloc((size_t)connections, sizeof *links);
    const char *host = count == 6 ? arguments[5] : NULL;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICHOST, .ai_family = host ? AF_UNSPEC : AF_INET6}, *where;
    if (links == NULL || getaddrinfo(host, arguments[1], &hints, &where) != 0) fail("address");
    int listener = -1, one = 1;
    if (host == NULL) {
        listener = socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (listener < 0) fail("socket");
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, where->ai_addr, where->ai_addrlen) != 0 || listen(listener, 4096) != 0) fail("listen");
        puts("listening");
        fflush(stdout);
    }
    for (long number = 0; number < connections; number++) {
        if (host == NULL) {
            int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) fail("accept");
            links[number].fd = fd;
            links[number].number = -1;
        } else {
            int fd = socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            if (fd < 0) fail("socket");
            if (connect(fd, where->ai_addr, where->ai_addrlen) != 0 && errno != EINPROGRESS) fail("connect");
            links[number].fd = fd;
            links[number].number = number;
        }
    }
    pthread_barrier_init(&all_made, NULL, (unsigned)connections);
    for (long number = 0; number < connections; number++) start(&links[number]);
    for (long number = 0; number < connections; number++) {
        struct link *link = &links[number];
        pthread_join(link->thread, NULL);
        printf("{\"number\": %ld, \"sent\": %lu, \"received\": %lu, \"longest_ms\": %.0f, \"after_ms\": %.0f, \"looks\": %ld, \"wrong\": %lu, \"first_wrong\": \"%s\", \"end\": \"%s\"}\n", link->number,
               link->sent, link->received, link->longest * 1000, link->when * 1000, link->looked, link->wrong, link->first_wrong, link->end);
    }
    return 0;
}

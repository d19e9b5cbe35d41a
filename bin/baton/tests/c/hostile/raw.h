/* System calls that no library sees, made by instructions of this program's own; and peers, which use nothing else. */

#include "draw.h"
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>

static inline long raw6(long number, long a, long b, long c, long d, long e, long f)
{
    long done;
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    register long sixth __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(done) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth) : "rcx", "r11", "memory");
    return done;
}
#define RAW3(number, a, b, c) raw6(number, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define RAW6(number, a, b, c, d, e, f) raw6(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* Repeats a raw call that a signal has interrupted, and fails if it fails. */
#define RAW_CHECK(call) \
    ({ \
        long done; \
        do \
            done = (call); \
        while (done == -EINTR); \
        if (done < 0) \
            errno = -done; \
        CHECK(done >= 0 && #call[0]); \
        done; \
    })

/* A connection between this program and a peer. */
struct connection {
    /* The program's end, by the number that counts now, and the peer's, which only raw calls use. */
    _Atomic int fd;
    int peer;
    /* What the peer sends, and what it has received. */
    size_t base, peer_sends, peer_sent, peer_got;
    size_t base_of_program;
    /* How far a SKIP has come: its bytes so far. */
    int skipped;
    unsigned skip_to;
    /* Wakes a peer that holds its data back. */
    int go;
    struct random random;
    pthread_t thread;
    const char *volatile now;
};

/* Steps that the disturbing thread has done, and whether peers must not wait for one. */
static _Atomic unsigned steps, is_free;

/* What a peer receives is what the program has sent, in order. */
static inline void peer_takes(struct connection *connection, const unsigned char *bytes, size_t length)
{
    for (size_t at = 0; at < length; at++) {
        if (connection->skipped > 0) {
            CHECK(bytes[at] < 0x80);
            connection->skip_to = connection->skip_to << 7 | bytes[at];
            if (++connection->skipped == SKIP_LENGTH) {
                CHECK(connection->skip_to >= connection->peer_got && connection->skip_to <= connection->peer_got + MOST);
                connection->peer_got = connection->skip_to;
                connection->skipped = 0;
            }
        } else if (bytes[at] == SKIP) {
            connection->skipped = 1;
            connection->skip_to = 0;
        } else {
            if (bytes[at] != pattern[connection->base_of_program + connection->peer_got])
                fprintf(stderr, "fd %d: byte %zu is %02x, not %02x\n", connection->fd, connection->peer_got, bytes[at],
                        pattern[connection->base_of_program + connection->peer_got]);
            CHECK(bytes[at] == pattern[connection->base_of_program + connection->peer_got]);
            connection->peer_got++;
        }
    }
}

/* Sends and receives until both ends have said that nothing follows. Holds what it sends back now and then, until the disturbing thread
 * has done a step. */
static void *play_peer(void *of)
{
    struct connection *connection = of;
    struct random *random = &connection->random;
    static __thread unsigned char piece[1 << 16];
    int shut = 0, ended = 0, holds = 0;
    unsigned until = 0;
    pthread_setname_np(pthread_self(), "peer");
    while (!shut || !ended) {
        holds = holds && !is_free && (int)(steps - until) < 0;
        struct pollfd entries[2] = {{connection->peer, (ended ? 0 : POLLIN) | (shut || holds ? 0 : POLLOUT), 0}, {connection->go, POLLIN, 0}};
        connection->now = holds ? "holds back" : "waits";
        RAW_CHECK(RAW3(SYS_poll, entries, 2, -1));
        if (entries[1].revents & POLLIN)
            RAW_CHECK(RAW3(SYS_read, connection->go, piece, 8));
        if (!ended && entries[0].revents & (POLLIN | POLLHUP | POLLERR)) {
            size_t got = RAW_CHECK(RAW3(SYS_read, connection->peer, piece, draw_length(random, sizeof piece)));
            peer_takes(connection, piece, got);
            ended = got == 0;
        }
        if (shut || holds || !(entries[0].revents & POLLOUT))
            continue;
        size_t left = connection->peer_sends - connection->peer_sent;
        if (left == 0) {
            RAW_CHECK(RAW3(SYS_shutdown, connection->peer, SHUT_WR, 0));
            shut = 1;
        } else {
            size_t length = draw_length(random, left);
            long sent = RAW6(SYS_sendto, connection->peer, pattern + connection->base + connection->peer_sent, length, MSG_DONTWAIT, 0, 0);
            CHECK(sent > 0 || sent == -EAGAIN);
            connection->peer_sent += sent > 0 ? sent : 0;
            if ((holds = one_in(random, 4)))
                until = steps + 1;
        }
    }
    connection->now = "done";
    return NULL;
}

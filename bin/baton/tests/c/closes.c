/* A close of a connection of which everything has been read sends a FIN, though more comes just behind it: the peer reads the end of the
 * stream, as if it had come later. Usage: closes CASE [moved] */

#include "sockets.h"
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define ROUNDS 60
/* Microseconds after which a close has sent its FIN, natively. */
#define LATER 20

static struct pair ends;
static atomic_int waits, closes;
static ssize_t end;

static long micros(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

/* The peer sends something when the other end is being closed, and reads how the stream ends. */
static void *send_late(void *unused)
{
    char got;
    waits = 1;
    while (!closes)
        ;
    /* Waits: no call says that the close has sent its FIN. */
    for (long until = micros() + LATER; micros() < until;)
        ;
    send(ends.client, "late", 4, MSG_NOSIGNAL);
    end = recv(ends.client, &got, 1, 0);
    CHECK(end == 0 || errno == ECONNRESET);
    return unused;
}

int main(int count, char **arguments)
{
    int resets = 0;
    CHECK(count >= 2 && strcmp(arguments[1], "late") == 0);
    alarm(STANDS_STILL);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t peer;
        ends = connect_used(count > 2);
        waits = closes = 0;
        CHECK(pthread_create(&peer, NULL, send_late, NULL) == 0);
        while (!waits)
            sched_yield();
        closes = 1;
        CHECK(close(ends.server) == 0);
        CHECK(pthread_join(peer, NULL) == 0 && close(ends.client) == 0);
        resets += end != 0;
    }
    /* A thread that gets no processor between the flag and its close closes too late, natively too. */
    CHECK(2 * resets < ROUNDS);
    return 0;
}

/* How much is unread, asked for by many threads while the connection moves. Usage: unread CASE */

#include "sockets.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <time.h>

#define UNREAD 1000
#define THREADS 8
#define SECONDS 1

static struct pair ends;
static atomic_int is_over;

static int unread_now(void)
{
    int unread = 0;
    CHECK(ioctl(ends.server, FIONREAD, &unread) == 0);
    CHECK(unread == UNREAD || unread == UNREAD + 1);
    return unread;
}

static void *ask(void *unused)
{
    while (!is_over)
        unread_now();
    return unused;
}

int main(void)
{
    static char bytes[UNREAD];
    pthread_t threads[THREADS];
    time_t end = time(NULL) + SECONDS + 1;
    alarm(STANDS_STILL);
    ends = connect_pair();
    CHECK(setsockopt(ends.client, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)) == 0);
    CHECK(send(ends.client, bytes, sizeof bytes, 0) == sizeof bytes);
    CHECK(recv(ends.server, bytes, sizeof bytes, MSG_PEEK | MSG_WAITALL) == sizeof bytes);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_create(&threads[at], NULL, ask, NULL) == 0);
    while (time(NULL) < end) {
        CHECK(send(ends.client, bytes, 1, 0) == 1);
        while (unread_now() == UNREAD)
            sched_yield();
        CHECK(recv(ends.server, bytes, 1, 0) == 1);
    }
    is_over = 1;
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    return 0;
}

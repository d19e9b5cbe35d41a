/* A thread of a real-time priority that shares a processor with an ordinary one, which uses the same connection or another one of the same
 * process. What the ordinary thread holds when it loses the processor it gives back only if the other one sleeps.
 *
 *     priority CASE [moved] */

#include "sockets.h"
#include <pthread.h>
#include <time.h>

/* Most processor time of a call, in milliseconds. One that waits in a loop has the processor for nearly a second, or for ever. */
enum { MOST = 300, ROUNDS = 3000 };

static struct pair ordinary, real;
static int over, processor;

static void use_processor(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    CHECK(pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0);
}

static void receive_nothing(int fd)
{
    char byte;
    CHECK(recv(fd, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

static void *receive_always(void *unused)
{
    use_processor();
    while (!__atomic_load_n(&over, __ATOMIC_ACQUIRE))
        receive_nothing(ordinary.server);
    return unused;
}

static long used(void)
{
    struct timespec now;
    CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void *receive_first(void *unused)
{
    struct sched_param first = {.sched_priority = 10};
    struct timespec nap = {.tv_nsec = 100000};
    use_processor();
    CHECK(pthread_setschedparam(pthread_self(), SCHED_FIFO, &first) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        /* Waits: so that the other threads get on, below this one. */
        CHECK(nanosleep(&nap, NULL) == 0);
        long before = used();
        receive_nothing(real.server);
        CHECK(used() - before < MOST);
    }
    return unused;
}

int main(int count, char **words)
{
    pthread_t threads[2];
    cpu_set_t set;
    alarm(STANDS_STILL);
    CHECK(count > 1);
    int moved = count > 2 && strcmp(words[2], "moved") == 0;
    ordinary = connect_used(moved);
    real = strcmp(words[1], "one connection") == 0 ? ordinary : connect_used(moved);
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    for (int at = 0; at < CPU_SETSIZE; at++)
        if (CPU_ISSET(at, &set))
            processor = at;
    CHECK(pthread_create(&threads[0], NULL, receive_always, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, receive_first, NULL) == 0);
    CHECK(pthread_join(threads[1], NULL) == 0);
    __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
    CHECK(pthread_join(threads[0], NULL) == 0);
    exchange(real.client, real.server, "as before\n");
}

/* Two threads sleep, each in an epoll set of its own. The doorbell wakes the first one, which leaves epoll_wait by siglongjmp before the
 * library has read the NIC's events. The second one, which is then the only one asleep, must be woken by the next event. */

#include "sockets.h"
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <time.h>

#define ROUNDS 20

struct sleeper {
    struct pair ends;
    int set;
    volatile pid_t thread;
    sem_t sleep, woken;
};

static struct sleeper leaver, other;
static sigjmp_buf back;
static volatile sig_atomic_t armed;

static void leave(int signal)
{
    (void)signal;
    if (armed) {
        armed = 0;
        siglongjmp(back, 1);
    }
}

static void make(struct sleeper *made)
{
    struct epoll_event event = {.events = EPOLLIN};
    made->ends = connect_pair();
    while (!is_on_nic(made->ends.server))
        exchange(made->ends.client, made->ends.server, "hello\n");
    CHECK((made->set = epoll_create1(0)) >= 0 && epoll_ctl(made->set, EPOLL_CTL_ADD, made->ends.server, &event) == 0);
    CHECK(epoll_wait(made->set, &event, 1, 0) == 0);
    CHECK(sem_init(&made->sleep, 0, 0) == 0 && sem_init(&made->woken, 0, 0) == 0);
}

static void *leaves(void *nothing)
{
    struct epoll_event event;
    struct sched_param none = {0};
    /* At this priority it runs only while the main thread waits. */
    CHECK(pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        /* The signal of the last round may come here, if this thread was faster. */
        while (sem_wait(&leaver.sleep) != 0)
            CHECK(errno == EINTR);
        if (sigsetjmp(back, 1) == 0) {
            armed = 1;
            leaver.thread = gettid();
            CHECK(epoll_wait(leaver.set, &event, 1, -1) == 1);
            armed = 0;
        }
        CHECK(sem_post(&leaver.woken) == 0);
    }
    return nothing;
}

static void *receives(void *nothing)
{
    struct epoll_event event;
    char byte;
    other.thread = gettid();
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(epoll_wait(other.set, &event, 1, -1) == 1 && read(other.ends.server, &byte, 1) == 1);
        CHECK(sem_post(&other.woken) == 0);
    }
    return nothing;
}

/* Waits until a thread has begun, and sleeps. */
static void until_asleep(struct sleeper *sleeper)
{
    char path[64], line[200], state = 0;
    struct timespec pause = {0, 200000};
    while (sleeper->thread == 0)
        /* Waits: between two looks. */
        nanosleep(&pause, NULL);
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper->thread);
    while (state != 'S') {
        FILE *file = fopen(path, "r");
        CHECK(file != NULL && fgets(line, sizeof line, file) != NULL && fclose(file) == 0);
        CHECK(sscanf(strrchr(line, ')'), ") %c", &state) == 1);
        /* Waits: between two looks. */
        nanosleep(&pause, NULL);
    }
}

/* Keeps the processor, long enough for the NIC to receive what was sent, and to wake a thread. */
static void spin(void)
{
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begun.tv_sec) * 1000000000L + now.tv_nsec - begun.tv_nsec < 2000000);
}

int main(void)
{
    struct sigaction action = {.sa_handler = leave};
    struct timespec limit;
    cpu_set_t first, all;
    pthread_t threads[2];
    char byte;
    alarm(STANDS_STILL);
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    make(&leaver);
    make(&other);
    CHECK(pthread_create(&threads[1], NULL, receives, NULL) == 0);
    CPU_ZERO(&first);
    CPU_SET(sched_getcpu(), &first);
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0 && sched_setaffinity(0, sizeof first, &first) == 0);
    CHECK(pthread_create(&threads[0], NULL, leaves, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        leaver.thread = 0;
        CHECK(sem_post(&leaver.sleep) == 0);
        until_asleep(&leaver);
        until_asleep(&other);
        CHECK(write(leaver.ends.client, "1", 1) == 1);
        spin();
        CHECK(pthread_kill(threads[0], SIGUSR1) == 0);
        CHECK(sem_wait(&leaver.woken) == 0);
        CHECK(write(other.ends.client, "2", 1) == 1);
        clock_gettime(CLOCK_REALTIME, &limit);
        limit.tv_sec += 5;
        CHECK(sem_timedwait(&other.woken, &limit) == 0);
        CHECK(recv(leaver.ends.server, &byte, 1, 0) == 1);
    }
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    return 0;
}

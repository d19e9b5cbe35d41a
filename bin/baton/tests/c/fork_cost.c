/* What fork costs a process with many connections. Usage: fork_cost CONNECTIONS [moved]
 *
 * Prints the least of some forks: microseconds until it returns in the parent, and in the child, and page faults of the parent's until then.
 * With "moved" every connection is on the NIC at each of them. */

#include "sockets.h"
#include <limits.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

static long microseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000L + time.tv_nsec / 1000;
}

/* Pages that a fork has protected, and that the process writes, are among them. */
static long page_faults(void)
{
    struct rusage used;
    CHECK(getrusage(RUSAGE_THREAD, &used) == 0);
    return used.ru_minflt;
}

static long less(long one, long other)
{
    return one < other ? one : other;
}

int main(int count, char **arguments)
{
    enum { FORKS = 9, FORKS_OF_MOVED = 3 };
    int moved = count == 3 && strcmp(arguments[2], "moved") == 0;
    long parents = LONG_MAX, childs = LONG_MAX, faults = LONG_MAX;
    struct rlimit most;
    alarm(STANDS_STILL);
    CHECK(count == 2 || moved);
    rlim_t wanted = atoi(arguments[1]);
    CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_max >= wanted + 1000);
    most.rlim_cur = wanted + 1000;
    CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
    /* Both ends are this process's. */
    struct pair *pairs = calloc(wanted / 2 + 1, sizeof *pairs);
    CHECK(pairs != NULL);
    for (rlim_t made = 0; made < wanted; made += 2)
        pairs[made / 2] = connect_pair();
    for (int round = 0; round < (moved ? FORKS_OF_MOVED : FORKS); round++) {
        int ends[2];
        for (rlim_t at = 0; moved && at < wanted; at += 2) {
            until_on_nic(pairs[at / 2].server);
            until_on_nic(pairs[at / 2].client);
        }
        long took;
        CHECK(pipe(ends) == 0);
        long faulted = page_faults();
        long begun = microseconds();
        pid_t child = fork();
        long now = microseconds() - begun;
        faulted = page_faults() - faulted;
        if (child == 0)
            _exit(write(ends[1], &now, sizeof now) != sizeof now);
        CHECK(child > 0 && read(ends[0], &took, sizeof took) == sizeof took);
        CHECK(waitpid(child, NULL, 0) == child);
        close(ends[0]);
        close(ends[1]);
        parents = less(parents, now);
        childs = less(childs, took);
        faults = less(faults, faulted);
    }
    printf("%ld %ld %ld\n", parents, childs, faults);
    return 0;
}

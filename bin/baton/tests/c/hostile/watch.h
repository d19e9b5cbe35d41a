/* Says where every thread stands when a round hangs. */

#include "disturb.h"
#include <dirent.h>
#include <linux/futex.h>
#include <time.h>

static _Atomic unsigned rounds_done;
static int patience = 20;

static void say_file(const char *path)
{
    char text[2000];
    long fd = RAW6(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0, 0, 0), got = 0;
    if (fd >= 0 && (got = RAW3(SYS_read, fd, text, sizeof text - 1)) > 0) {
        text[got] = 0;
        say(text);
    }
    say(got > 0 && text[got - 1] == '\n' ? "" : "\n");
    RAW3(SYS_close, fd, 0, 0);
}

static void say_threads(int process)
{
    char path[320], all[4096];
    snprintf(path, sizeof path, "/proc/%d/task", process);
    long fd = RAW6(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0, 0, 0), got;
    while (fd >= 0 && (got = RAW3(SYS_getdents64, fd, all, sizeof all)) > 0)
        for (struct dirent *entry = (void *)all; (char *)entry < all + got; entry = (void *)((char *)entry + entry->d_reclen)) {
            if (entry->d_name[0] == '.')
                continue;
            for (int of = 0; of < 5; of++) {
                snprintf(path, sizeof path, "/proc/%d/task/%s/%s", process, entry->d_name, (const char *[]){"comm", "syscall", "wchan", "status", "stack"}[of]);
                say_file(path);
            }
            say("--\n");
        }
}

static void say_all(void)
{
    char line[200];
    struct round *round = round_now;
    if (round != NULL) {
        snprintf(line, sizeof line, "round %u hangs: disturber: %s, child %d, step %u, free %u\n", round->number, round->now ? round->now : "", child_now, steps,
                 is_free);
        say(line);
        for (unsigned at = 0; at < round->flow_count; at++) {
            struct flow *flow = &round->flows[at];
            snprintf(line, sizeof line, "%s of fd %d: %zu of %zu, asks for %zu: %s\n", flow->writes ? "writer" : "reader", flow->connection->fd, flow->at,
                     flow->total, flow->asked, flow->now ? flow->now : "");
            say(line);
        }
        for (unsigned at = 0; at < round->connection_count; at++) {
            struct connection *connection = &round->connections[at];
            snprintf(line, sizeof line, "peer of fd %d: sent %zu of %zu, got %zu: %s; on the NIC: %d\n", connection->fd, connection->peer_sent,
                     connection->peer_sends, connection->peer_got, connection->now ? connection->now : "", is_on_nic(connection->fd));
            say(line);
            say_socket("here", connection->fd);
            say_socket("peer", connection->peer);
        }
    }
    say_threads(getpid());
    if (child_now)
        say_threads(child_now);
}

static void *watch(void *unused)
{
    struct timespec limit = {patience, 0};
    pthread_setname_np(pthread_self(), "watchdog");
    for (unsigned seen = rounds_done;; seen = rounds_done) {
        RAW6(SYS_futex, &rounds_done, FUTEX_WAIT_PRIVATE, seen, &limit, 0, 0);
        struct timespec pause = {0, 1000000};
        if (rounds_done == seen && RAW3(SYS_nanosleep, &pause, 0, 0) == 0 && rounds_done == seen) {
            say_all();
            /* It would keep this process's output open. */
            if (child_now)
                RAW3(SYS_kill, child_now, SIGKILL, 0);
            RAW3(SYS_exit_group, 4, 0, 0);
        }
    }
    return unused;
}

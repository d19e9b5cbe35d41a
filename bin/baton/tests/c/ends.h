/* A connection of which a program has both ends, for calls that are left before they return: it works afterwards, and nothing is left of
 * them. */

#include "sockets.h"
#include <dirent.h>
#include <poll.h>
#include <sys/epoll.h>

/* One end receives; the other sends, and receives nothing. */
static struct pair ends;
/* A set with the receiving end. */
static int set;
static int may_move;
static char some[1 << 16];

static inline int count_descriptors(void)
{
    DIR *all = opendir("/proc/self/fd");
    int count = 0;
    CHECK(all != NULL);
    while (readdir(all) != NULL)
        count++;
    closedir(all);
    return count;
}

static inline void open_ends(void)
{
    struct epoll_event event = {.events = EPOLLIN};
    ends = connect_pair();
    exchange(ends.client, ends.server, "hello\n");
    exchange(ends.server, ends.client, "hello\n");
    if (may_move)
        exchange_until_on_nic(ends, ends.server), exchange_until_on_nic(ends, ends.client);
    CHECK((set = epoll_create1(0)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, ends.server, &event) == 0);
}

/* A call that does not sleep. */
static inline void call_at_once(int call)
{
    struct pollfd entry = {ends.server, POLLIN, 0};
    struct epoll_event event;
    switch (call) {
    case 0: poll(&entry, 1, 0); break;
    case 1: epoll_wait(set, &event, 1, 0); break;
    case 2: recv(ends.server, some, 100, MSG_DONTWAIT); break;
    case 3: send(ends.client, some, 100, MSG_DONTWAIT); break;
    }
}
#define CALLS_AT_ONCE 4

/* Closes the connection, which works, and moves. `is_empty`: nothing is under way to the receiving end. */
static inline void close_ends(int is_empty)
{
    static int trips;
    int tos = 16;
    if (is_empty) {
        exchange(ends.client, ends.server, "hello\n");
        exchange(ends.server, ends.client, "hello\n");
        if (may_move && trips++ % 8 == 0) {
            /* Back, and there again, which the agent does after a second. */
            CHECK(setsockopt(ends.server, IPPROTO_IP, IP_TOS, &tos, sizeof tos) == 0);
            exchange_until_on_nic(ends, ends.server);
        }
    } else {
        CHECK(shutdown(ends.client, SHUT_WR) == 0);
        while (recv(ends.server, some, sizeof some, 0) > 0)
            ;
        exchange(ends.server, ends.client, "hello\n");
    }
    CHECK(close(set) == 0 && close(ends.server) == 0 && close(ends.client) == 0);
}

/* Flags of recv(2) together, on data that is there, partly, or not at all. Usage: flags [moved]
 *
 * Prints a line for each call: its result, errno, the bytes, and what is left. A call that waits is ended by the peer, who sends the rest or
 * ends the stream once it sees that the thread sleeps. */

#include "sockets.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <sys/uio.h>

enum { WANTED = 10 };
enum { NOTHING, PARTLY, ENOUGH, PARTLY_AND_END, PARTLY_AND_RESET, ONLY_END, SITUATIONS };
static const char *const situations[] = {"nothing", "partly", "enough", "partly, then the end", "partly, then a reset", "the end"};
static const int flags_of[] = {MSG_PEEK, MSG_WAITALL, MSG_TRUNC, MSG_DONTWAIT};
enum { BLOCKING, NONBLOCKING, LIMITED, NEGATIVE, LOWAT, MODES };
static const char *const modes[] = {"blocking", "non-blocking", "with a limit", "with a negative limit", "with a low-water mark"};

static struct pair ends;
static pid_t sleepers_id;
static atomic_int calling, over;
static long result;
static int number, flags, pieces, moved;
static char got[2 * WANTED];

static void *receives(void *nothing)
{
    struct iovec vectors[2] = {{got, 3}, {got + 3, WANTED - 3}};
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = 2};
    sleepers_id = syscall(SYS_gettid);
    memset(got, '.', sizeof got);
    calling = 1;
    errno = 0;
    result = pieces ? recvmsg(ends.server, &message, flags) : recv(ends.server, got, WANTED, flags);
    number = errno;
    over = 1;
    return nothing;
}

/* Waits until the thread sleeps in its call, or has returned. */
static void until_asleep(void)
{
    char path[64], text[512];
    while (!calling)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleepers_id);
    for (int seen = 0; seen < 3 && !over;) {
        int fd = open(path, O_RDONLY);
        ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        close(fd);
        text[length > 0 ? length : 0] = 0;
        char *end = strrchr(text, ')');
        seen = end && end[2] == 'S' ? seen + 1 : 0;
        sched_yield();
    }
}

static void until_there(int bytes)
{
    for (int there = -1; there < bytes;)
        CHECK(ioctl(ends.server, FIONREAD, &there) == 0);
}

static void until(short event)
{
    struct pollfd entry = {.fd = ends.server, .events = event};
    CHECK(poll(&entry, 1, 20000) == 1);
}

static void end_stream(int by_reset)
{
    struct linger at_once = {1, 0};
    if (!by_reset) {
        CHECK(shutdown(ends.client, SHUT_WR) == 0);
        return;
    }
    CHECK(setsockopt(ends.client, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    CHECK(close(ends.client) == 0);
    ends.client = -1;
}

static void play(int situation, int mode, int which)
{
    struct timeval limit = {.tv_usec = 30000};
    pthread_t thread;
    ends = connect_used(moved);
    flags = 0;
    for (int bit = 0; bit < 4; bit++)
        flags |= which >> bit & 1 ? flags_of[bit] : 0;
    pieces = which >> 4 & 1;
    if (mode == NONBLOCKING)
        CHECK(fcntl(ends.server, F_SETFL, O_NONBLOCK) == 0);
    if (mode == LIMITED)
        CHECK(setsockopt(ends.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    if (mode == NEGATIVE)
        CHECK(setsockopt(ends.server, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){-1, 0}, sizeof limit) == 0);
    if (mode == LOWAT)
        CHECK(setsockopt(ends.server, SOL_SOCKET, SO_RCVLOWAT, &(int){7}, sizeof(int)) == 0);
    int there = situation == ENOUGH ? 12 : situation == NOTHING || situation == ONLY_END ? 0 : 4;
    CHECK(write(ends.client, "abcdefghijkl", there) == there);
    until_there(there);
    if (situation == PARTLY_AND_END || situation == ONLY_END) {
        end_stream(0);
        until(POLLRDHUP);
    }
    calling = over = 0;
    CHECK(pthread_create(&thread, NULL, receives, NULL) == 0);
    until_asleep();
    int waits = !over;
    if (mode == LIMITED && waits) {
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        if (waits && situation == PARTLY_AND_RESET)
            end_stream(1);
        else if (waits)
            CHECK(write(ends.client, "efghijklmnop", 12) == 12);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    int left = -1;
    if (situation != PARTLY_AND_RESET) {
        if (waits && mode != LIMITED)
            until_there(there + 12 - (flags & MSG_PEEK || result < 0 ? 0 : (int)result));
        CHECK(ioctl(ends.server, FIONREAD, &left) == 0);
    }
    printf("%s, %s, %s%s%s%s%s: %ld (%d) %.*s left %d %s\n", situations[situation], modes[mode], pieces ? "recvmsg" : "recv",
           flags & MSG_PEEK ? " PEEK" : "", flags & MSG_WAITALL ? " WAITALL" : "", flags & MSG_TRUNC ? " TRUNC" : "",
           flags & MSG_DONTWAIT ? " DONTWAIT" : "", result, result < 0 ? number : 0, (int)sizeof got, got, left, waits && mode != LIMITED ? "waits" : "");
    close(ends.server);
    if (ends.client >= 0)
        close(ends.client);
}

int main(int arguments, char **words)
{
    alarm(STANDS_STILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    (void)words;
    moved = arguments > 1;
    for (int situation = 0; situation < SITUATIONS; situation++)
        for (int mode = 0; mode < MODES; mode++)
            for (int which = 0; which < 32; which++)
                play(situation, mode, which);
    return 0;
}

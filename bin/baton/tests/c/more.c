/* MSG_MORE: bytes wait for what comes next, for 200 ms at most. Usage: more CASE [moved] */

#include "sockets.h"
#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <time.h>

enum { ROUNDS = 30 };

static struct pair ends, other;

static long milliseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000L + time.tv_nsec / 1000000;
}

static int arrived(void)
{
    int there;
    CHECK(ioctl(ends.client, FIONREAD, &there) == 0);
    return there;
}

/* An acknowledgement of earlier data makes the sender send held bytes at once. So none may be outstanding when a round begins. */
static void until_acknowledged(void)
{
    int left;
    do {
        CHECK(ioctl(ends.server, SIOCOUTQ, &left) == 0);
        sched_yield();
    } while (left > 0);
}

static long hold(int round, const char *bytes, size_t length)
{
    int flags = MSG_MORE | (round % 2 ? MSG_DONTWAIT : 0) | MSG_NOSIGNAL;
    struct iovec pieces[2] = {{(char *)bytes, 1}, {(char *)bytes + 1, length - 1}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    return round % 3 == 0 ? send(ends.server, bytes, length, flags) : round % 3 == 1 ? sendmsg(ends.server, &message, flags) : sendto(ends.server, bytes, length, flags, NULL, 0);
}

/* What is held has not arrived when what was sent later, over another connection, has come back; and it arrives with what comes next. */
static void next(void)
{
    int seen = 0;
    char got[16];
    for (int round = 0; round < ROUNDS; round++) {
        until_acknowledged();
        long begun = milliseconds();
        CHECK(hold(round, "abc", 3) == 3);
        for (int at = 0; at < 3; at++) {
            exchange(other.server, other.client, "there\n");
            exchange(other.client, other.server, "back\n");
        }
        int early = arrived();
        if (milliseconds() - begun < 150) {
            CHECK(early == 0);
            seen++;
        }
        CHECK(send(ends.server, "def", 3, 0) == 3);
        CHECK(poll(&(struct pollfd){.fd = ends.client, .events = POLLIN}, 1, -1) == 1);
        CHECK(arrived() == (early ? arrived() : 6));
        CHECK(recv(ends.client, got, 6, MSG_WAITALL) == 6 && memcmp(got, "abcdef", 6) == 0);
    }
    CHECK(seen > 0);
}

/* Nothing comes: the bytes leave nevertheless. */
static void alone(void)
{
    char got[16];
    long begun = milliseconds();
    CHECK(hold(0, "abc", 3) == 3);
    CHECK(recv(ends.client, got, 3, MSG_WAITALL) == 3 && memcmp(got, "abc", 3) == 0);
    CHECK(milliseconds() - begun >= 150);
}

/* What fills segments leaves at once, and the end of the stream takes along what waits. */
static void much(void)
{
    static char bytes[100000], got[100000];
    memset(bytes, 'b', sizeof bytes);
    CHECK(send(ends.server, bytes, sizeof bytes, MSG_MORE) == sizeof bytes);
    CHECK(recv(ends.client, got, 20000, MSG_WAITALL) == 20000);
    CHECK(shutdown(ends.server, SHUT_WR) == 0);
    CHECK(recv(ends.client, got, 80000, MSG_WAITALL) == 80000 && memcmp(got, bytes, 80000) == 0);
    CHECK(recv(ends.client, got, 1, 0) == 0);
}

int main(int count, char **words)
{
    alarm(STANDS_STILL);
    CHECK(count > 1);
    ends = connect_pair(), other = connect_pair();
    struct pair all[] = {ends, other};
    for (int at = 0; at < 2; at++) {
        exchange(all[at].client, all[at].server, "first\n");
        exchange(all[at].server, all[at].client, "second\n");
        if (count > 2) {
            until_on_nic(all[at].server);
            until_on_nic(all[at].client);
        }
    }
    strcmp(words[1], "next") == 0 ? next() : strcmp(words[1], "alone") == 0 ? alone() : much();
    return 0;
}

/* Calls that transfer a part of what is asked for. The peer sends fewer bytes than MSG_WAITALL or SO_RCVLOWAT asks for. When SO_RCVTIMEO
 * expires, or a signal comes, the call must return these bytes, and not EAGAIN or EINTR. When the others come it must return all of them,
 * also where it only looks (MSG_PEEK). Or a send fills the queue. Or several messages are received within a time limit.
 * Usage: partly CASE [moved] */

#include "sockets.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#define WANTED 8
#define COME 3

static struct pair ends;
static pthread_t receiver;
static atomic_int is_over, by_signal;

static void nothing(int number)
{
    (void)number;
}

static void wait_a_little(void)
{
    /* Waits: so that the receiver is usually in its call by then. If it is not, the result is the same. */
    nanosleep(&(struct timespec){0, 20000000}, NULL);
}

/* Sends some of the bytes while the receiver waits, and interrupts it once they have come. */
static void *send_some(void *unused)
{
    int under_way = COME;
    wait_a_little();
    CHECK(send(ends.client, "abc", COME, 0) == COME);
    while (by_signal && under_way > 0) {
        CHECK(ioctl(ends.client, TIOCOUTQ, &under_way) == 0);
        sched_yield();
    }
    while (by_signal && !is_over) {
        CHECK(pthread_kill(receiver, SIGUSR1) == 0);
        wait_a_little();
    }
    return unused;
}

static char got[WANTED];

static ssize_t by_recv(int flags)
{
    return recv(ends.server, got, WANTED, flags);
}

static ssize_t by_recvfrom(int flags)
{
    return recvfrom(ends.server, got, WANTED, flags, NULL, NULL);
}

static ssize_t by_recvmsg(int flags)
{
    struct iovec pieces[] = {{got, 2}, {got + 2, WANTED - 2}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    return recvmsg(ends.server, &message, flags);
}

static ssize_t by_read(int flags)
{
    (void)flags;
    return read(ends.server, got, WANTED);
}

static ssize_t by_readv(int flags)
{
    struct iovec pieces[] = {{got, 1}, {got + 1, WANTED - 1}};
    (void)flags;
    return readv(ends.server, pieces, 2);
}

static void receive_partly(ssize_t (*receive)(int), int flags)
{
    pthread_t sender;
    int left = 0, expected = flags & MSG_PEEK ? COME : 0;
    memset(got, 0, sizeof got);
    is_over = 0;
    CHECK(pthread_create(&sender, NULL, send_some, NULL) == 0);
    ssize_t received = receive(flags);
    is_over = 1;
    CHECK(received == COME);
    CHECK(memcmp(got, "abc", COME) == 0);
    CHECK(pthread_join(sender, NULL) == 0);
    CHECK(ioctl(ends.server, FIONREAD, &left) == 0 && left == expected);
    CHECK(left == 0 || recv(ends.server, got, WANTED, MSG_DONTWAIT) == COME);
}

/* MSG_WAITALL with each call that takes flags; then SO_RCVLOWAT with every call. */
static void in_each_call(void)
{
    ssize_t (*with_flags[])(int) = {by_recv, by_recvfrom, by_recvmsg};
    ssize_t (*all[])(int) = {by_recv, by_recvfrom, by_recvmsg, by_read, by_readv};
    for (int at = 0; at < 3; at++) {
        receive_partly(with_flags[at], MSG_WAITALL);
        receive_partly(with_flags[at], MSG_WAITALL | MSG_PEEK);
    }
    CHECK(setsockopt(ends.server, SOL_SOCKET, SO_RCVLOWAT, &(int){WANTED}, sizeof(int)) == 0);
    for (int at = 0; at < 5; at++)
        receive_partly(all[at], 0);
    receive_partly(by_recv, MSG_PEEK);
}

static void time_is_over(void)
{
    struct timeval limit = {0, 200000};
    CHECK(setsockopt(ends.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    in_each_call();
}

static void a_signal_comes(void)
{
    struct sigaction action = {.sa_handler = nothing};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    receiver = pthread_self();
    by_signal = 1;
    in_each_call();
}

/* A part of the bytes, and the others while the receiver waits for them. */
static void *send_all(void *unused)
{
    CHECK(send(ends.client, "abc", COME, 0) == COME);
    wait_a_little();
    CHECK(send(ends.client, "defgh", WANTED - COME, 0) == WANTED - COME);
    return unused;
}

static void the_others_come(void)
{
    enum { ROUNDS = 100 };
    for (int round = 0; round < ROUNDS; round++) {
        pthread_t sender;
        CHECK(pthread_create(&sender, NULL, send_all, NULL) == 0);
        CHECK(by_recv(MSG_WAITALL | MSG_PEEK) == WANTED && memcmp(got, "abcdefgh", WANTED) == 0);
        CHECK(by_recvmsg(MSG_WAITALL) == WANTED && memcmp(got, "abcdefgh", WANTED) == 0);
        CHECK(pthread_join(sender, NULL) == 0);
    }
}

static char many[16 << 20];

static ssize_t by_write(int from)
{
    (void)from;
    return write(ends.server, many, sizeof many);
}

static ssize_t by_sendfile(int from)
{
    return sendfile(ends.server, from, &(off_t){0}, sizeof many);
}

/* A send fills the queue, after which the connection moves. Whoever waits for an edge gets one when there is room again. */
static void fill(ssize_t (*send_some)(int))
{
    struct epoll_event event = {.events = EPOLLOUT | EPOLLET}, reported;
    int set = epoll_create1(0), from = memfd_create("bytes", 0);
    CHECK(set >= 0 && from >= 0 && ftruncate(from, sizeof many) == 0);
    CHECK(fcntl(ends.server, F_SETFL, O_NONBLOCK) == 0);
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, ends.server, &event) == 0);
    CHECK(epoll_wait(set, &reported, 1, -1) == 1);
    ssize_t sent = send_some(from);
    CHECK(sent > 0 && sent < (ssize_t)sizeof many);
    if (getenv("BATON_RUN"))
        until_on_nic(ends.server);
    for (ssize_t left = sent, piece; left > 0; left -= piece)
        CHECK((piece = read(ends.client, many, left)) > 0);
    CHECK(epoll_wait(set, &reported, 1, -1) == 1 && reported.events == EPOLLOUT);
}

static void room_after_write(void)
{
    fill(by_write);
}

static void room_after_sendfile(void)
{
    fill(by_sendfile);
}

/* The time that is left is written back. */
static void messages_within_a_limit(void)
{
    enum { LIMIT = 20 };
    char got[2];
    struct iovec pieces[2] = {{got, 1}, {got + 1, 1}};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = pieces, .msg_iovlen = 1}}, {.msg_hdr = {.msg_iov = pieces + 1, .msg_iovlen = 1}}};
    struct timespec left = {LIMIT, 0};
    CHECK(send(ends.client, "ab", 2, 0) == 2);
    CHECK(recvmmsg(ends.server, messages, 2, 0, &left) == 2 && memcmp(got, "ab", 2) == 0);
    CHECK(left.tv_sec >= 0 && left.tv_sec < LIMIT);
}

/* More than a connection's receive memory has at once. */
#define LARGE (4 << 20)

static void *send_large(void *bytes)
{
    for (int at = 0; at < LARGE;) {
        ssize_t sent = send(ends.client, (char *)bytes + at, LARGE - at, 0);
        CHECK(sent > 0);
        at += sent;
    }
    return NULL;
}

static void all_of_much(void)
{
    char *bytes = malloc(LARGE), *got = malloc(LARGE);
    CHECK(bytes && got);
    for (int at = 0; at < LARGE; at++)
        bytes[at] = at % 251;
    for (int round = 0; round < 3; round++) {
        pthread_t sender;
        CHECK(pthread_create(&sender, NULL, send_large, bytes) == 0);
        CHECK(recv(ends.server, got, LARGE, MSG_WAITALL) == LARGE && memcmp(got, bytes, LARGE) == 0);
        CHECK(pthread_join(sender, NULL) == 0);
    }
}

/* The peer resets while a send waits: that returns what it has sent, and the next call says so. */
static void *reset_under_way(void *unused)
{
    struct linger at_once = {1, 0};
    CHECK(setsockopt(ends.client, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    wait_a_little();
    close(ends.client);
    return unused;
}

static void reset_in_the_middle(void)
{
    enum { MUCH = 64 << 20 };
    char *bytes = calloc(1, MUCH), got;
    pthread_t peer;
    CHECK(bytes && pthread_create(&peer, NULL, reset_under_way, NULL) == 0);
    ssize_t sent = send(ends.server, bytes, MUCH, MSG_NOSIGNAL);
    CHECK(sent > 0 && sent < MUCH);
    CHECK(recv(ends.server, &got, 1, 0) == -1 && errno == ECONNRESET);
    CHECK(pthread_join(peer, NULL) == 0);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {{"all of much", all_of_much}, {"reset", reset_in_the_middle}, {"time", time_is_over}, {"signal", a_signal_comes}, {"all", the_others_come}, {"write", room_after_write}, {"sendfile", room_after_sendfile}, {"messages", messages_within_a_limit}};
    alarm(STANDS_STILL);
    CHECK(count >= 2);
    ends = connect_used(count > 2);
    return run_case(cases, sizeof cases / sizeof cases[0], arguments[1]);
}

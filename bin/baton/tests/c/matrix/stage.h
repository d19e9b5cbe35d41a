/* The connection of a case, and what its peer does. */

#include "play.h"

static const char early[] = "abcdefghijkl", late[] = "efghijklmnop";
static int is_moving, is_moved;

/* How often a thread is seen to sleep until it counts as asleep for what has been done before. On the NIC that takes its time. */
static int patience(void)
{
    return is_moved ? 4000 : 200;
}


/* Waits until an event is reported, by the library for its own connections. */
static void until(struct play *play, short events)
{
    struct pollfd entry = {.fd = play->fd, .events = events};
    CHECK(poll(&entry, 1, 60000) == 1);
}

/* A connection that has been closed with data unread has been reset, and ends no more. */
static void end_peer(struct play *play)
{
    raw(SYS_shutdown, play->peer, SHUT_WR, 0, 0, 0, 0);
    play->peer_has_ended = 1;
}

static void reset_peer(struct play *play)
{
    struct linger at_once = {1, 0};
    raw_option(play->peer, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    CHECK(raw(SYS_close, play->peer, 0, 0, 0, 0, 0) == 0);
    play->peer = -1;
}

/* Sends until nothing fits, and what has been sent has been acknowledged, or seems not to be taken by the peer. */
static void fill(struct play *play)
{
    enum { SETTLED = 2, STUCK = 300 };
    static char piece[1 << 14];
    memset(piece, 'z', sizeof piece);
    for (int full = 0, stuck = 0; full < SETTLED && stuck < STUCK;) {
        struct tcp_info info;
        struct pollfd entry = {.fd = play->fd, .events = POLLOUT};
        socklen_t size = sizeof info;
        ssize_t sent = send(play->fd, piece, sizeof piece, MSG_DONTWAIT);
        CHECK(sent > 0 || errno == EAGAIN);
        play->filled += sent > 0 ? sent : 0;
        int has_room = sent > 0 || poll(&entry, 1, 0) != 0;
        CHECK(getsockopt(play->fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0);
        full = has_room || info.tcpi_unacked != 0 ? 0 : full + 1;
        stuck = has_room ? 0 : stuck + 1;
        if (!has_room)
            /* Waits: between two looks; the queue is full when many in a row find no room. */
            usleep(50);
    }
}

static void connect_case(struct play *play)
{
    const int small = FULL_QUEUE;
    play->peer = raw(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0, 0);
    CHECK(play->peer >= 0);
    raw_option(play->peer, SOL_SOCKET, SO_OOBINLINE, &(int){1}, sizeof(int));
    if (play->situation->after & FULL)
        raw_option(play->peer, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    CHECK(raw(SYS_connect, play->peer, (long)&listens, sizeof listens, 0, 0, 0) == 0);
    CHECK((play->fd = accept(listener, NULL, NULL)) >= 0);
    if (play->situation->after & FULL)
        CHECK(setsockopt(play->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
    if (is_moved)
        until_on_nic(play->fd);
    CHECK((play->set = epoll_create1(0)) >= 0 && pipe(play->other) == 0);
}

static void set_mode(struct play *play)
{
    struct timeval limit = {play->mode == LONG ? 100 : 0, play->mode == LONG ? 0 : 2000};
    if (play->mode == NONBLOCKING)
        CHECK(fcntl(play->fd, F_SETFL, O_NONBLOCK) == 0);
    if (play->mode == LONG || play->mode == SHORT)
        CHECK(setsockopt(play->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 && setsockopt(play->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
    if (play->mode == LOW_WATER)
        CHECK(setsockopt(play->fd, SOL_SOCKET, SO_RCVLOWAT, &(int){LOWAT}, sizeof(int)) == 0);
}

/* Brings the connection into the case's situation. */
static void prepare(struct play *play)
{
    const struct situation *situation = play->situation;
    int there = situation->there == PART ? PARTLY : situation->there == WHOLE ? ENOUGH : 0;
    connect_case(play);
    set_mode(play);
    if (play->call->arm)
        play->call->arm(play);
    if (situation->after & FULL)
        fill(play);
    if (situation->after & OWN_FIN) {
        struct pollfd entry = {.fd = play->peer, .events = POLLRDHUP};
        CHECK(shutdown(play->fd, SHUT_WR) == 0 && raw(SYS_poll, (long)&entry, 1, 60000, 0, 0, 0) == 1);
    }
    CHECK(raw_send(play->peer, early, there, 0) == there);
    for (int arrived = 0; arrived < there;)
        CHECK(ioctl(play->fd, FIONREAD, &arrived) == 0);
    if (situation->there == URGENT) {
        CHECK(raw_send(play->peer, "u", 1, MSG_OOB) == 1);
        until(play, POLLPRI);
    }
    if (situation->after & PEERS_FIN) {
        end_peer(play);
        until(play, POLLRDHUP);
    }
    if (situation->after & PEERS_RESET) {
        reset_peer(play);
        until(play, 0);
    }
}

/* Bytes that the peer receives: how many, and what they are. */
struct received {
    size_t count, filling;
    unsigned hash;
    int is_pattern; /* what was filled in, and then the digits over and over */
    char end[16];
};

static void take_note(struct received *received, const char *bytes, size_t size, size_t filled)
{
    for (size_t at = 0; at < size; at++) {
        size_t place = received->count + at;
        char expected = place < filled ? 'z' : digits[(place - filled) % 10];
        received->is_pattern &= bytes[at] == expected;
        if (place >= filled)
            received->hash = hash(received->hash, bytes + at, 1);
    }
    received->count += size;
}

/* Receives what there is. Returns what ends it: 0 for the end of the stream, else an errno negated. */
static long drain(struct play *play, struct received *received, int flags)
{
    static char got[1 << 16];
    long more;
    while ((more = raw_receive(play->peer, got, sizeof got, flags)) > 0)
        take_note(received, got, more, play->filled);
    return more;
}

static void *makes_call(void *argument)
{
    struct play *play = argument;
    play->id = raw(SYS_gettid, 0, 0, 0, 0, 0, 0);
    playing = play;
    if (sigsetjmp(play->back, 1) == 0) {
        errno = 0;
        play->begun = 1;
        play->result = play->call->make(play);
        play->error = errno;
    } else {
        play->faulted = 1;
    }
    play->over = 1;
    return NULL;
}

/* Whether the thread sleeps, as the kernel says so many times: in a row, unless it wakes at each move. False once it has returned from its
 * call. */
static int is_asleep(struct play *play, int times)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", play->id);
    for (int seen = 0; seen < times && !play->over;) {
        long fd = raw(SYS_open, (long)path, O_RDONLY, 0, 0, 0, 0);
        long length = fd < 0 ? 0 : raw(SYS_read, fd, (long)text, sizeof text - 1, 0, 0, 0);
        if (fd >= 0)
            raw(SYS_close, fd, 0, 0, 0, 0, 0);
        text[length > 0 ? length : 0] = 0;
        char *end = strrchr(text, ')');
        seen = end && end[2] == 'S' ? seen + 1 : is_moving ? seen : 0;
        sched_yield();
    }
    return !play->over;
}

/* Waits until the connection has moved, if it moves at all: for how long does not matter to what is compared. */
static void until_moved(struct play *play)
{
    int before = is_on_nic(play->fd);
    for (int look = 0; look < 2000 && !play->over && is_on_nic(play->fd) == before; look++)
        sched_yield();
}

/* What the peer does next, where the call still sleeps. When it has no more to do, a signal ends the call. */
static enum act next_act(const struct play *play, int done)
{
    if (done == 0 && play->situation->act != NO_ACT)
        return play->situation->act;
    return play->peer < 0 ? INTERRUPTS : play->peer_has_ended ? RESETS : ENDS;
}

/* `is_last`: natively the call returns then. */
static void act(struct play *play, enum act what, struct received *received, int is_last)
{
    size_t before;
    switch (what) {
    case NO_ACT: break;
    case SENDS: CHECK(raw_send(play->peer, late, COMES, 0) == COMES); break;
    case ENDS: end_peer(play); break;
    case RESETS: reset_peer(play); break;
    case INTERRUPTS: CHECK(pthread_kill(play->thread, SIGUSR1) == 0); break;
    case READS:
        do {
            before = received->count;
            drain(play, received, MSG_DONTWAIT);
        } while (!play->over && (is_last || before != received->count || !is_asleep(play, patience())));
    }
}

/* Waits until the thread has returned from its call, for so many seconds. */
static int returns(struct play *play, int seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    play->is_joined = play->is_joined || pthread_timedjoin_np(play->thread, NULL, &until) == 0;
    return play->is_joined;
}

/* Makes the call, and lets the peer act until it returns: `acts` times, or, if that is negative, whenever the thread is seen to sleep. Returns how
 * often, -1 if the call does not return. */
static int perform(struct play *play, int acts, struct received *received)
{
    int done = 0;
    CHECK(pthread_create(&play->thread, NULL, makes_call, play) == 0);
    while (!play->begun)
        sched_yield();
    /* Whether there is room at once is the queues' affair. */
    if (acts < 0 || (acts == 0 && play->call->sends && is_about_room(play) && !returns(play, 2)))
        acts = play->mode == SHORT || play->mode == NONBLOCKING ? 0 : INT_MAX;
    for (; done < acts && is_asleep(play, done == 0 ? 3 : patience()); done++) {
        if (is_moving && done == 0)
            until_moved(play);
        act(play, next_act(play, done), received, done + 1 == acts);
    }
    return returns(play, PATIENCE) ? done : -1;
}

/* What is left: events, what else there is to receive, what the peer has received, how it ends. */
static void print_rest(struct play *play, struct received *received, int is_full)
{
    static char got[1 << 16];
    struct pollfd entry = {.fd = play->fd, .events = POLLIN | POLLPRI | POLLRDHUP | (is_full ? 0 : POLLOUT)};
    struct timeval patience = {.tv_sec = PATIENCE};
    unsigned sum = 0;
    long more, total = 0;
    int ready = poll(&entry, 1, 0);
    printf(" ready=%d/%hx", ready, entry.revents);
    if (play->peer >= 0 && !play->peer_has_ended)
        end_peer(play);
    fcntl(play->fd, F_SETFL, 0);
    setsockopt(play->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(play->fd, SOL_SOCKET, SO_RCVLOWAT, &(int){1}, sizeof(int));
    while ((more = recv(play->fd, got, sizeof got, 0)) > 0)
        sum = hash(sum, got, more), total += more;
    printf(" rest=%ld/%x/%d", total, sum, more < 0 ? errno : 0);
    int shut = shutdown(play->fd, SHUT_WR);
    printf(" shut=%d", shut < 0 ? errno : 0);
    if (play->extra >= 0)
        close(play->extra);
    close(play->fd);
    if (play->peer < 0)
        return;
    raw_option(play->peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    long end = drain(play, received, 0);
    if (is_full)
        printf(" peer=%s/%ld", received->is_pattern ? "pattern" : "other", -end);
    else
        printf(" peer=%zu/%x/%ld", received->count, received->hash, -end);
    reset_peer(play);
}

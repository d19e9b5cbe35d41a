/* Calls that wait for events, of the connection and of another descriptor. */

#include "play.h"

/* Functions that the compiler puts in the place of others. */
int __poll_chk(struct pollfd *, nfds_t, int, size_t);
int __ppoll_chk(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);

static const struct named poll_flags[] = {
    {"IN", POLLIN}, {"OUT", POLLOUT}, {"PRI", POLLPRI}, {"RDHUP", POLLRDHUP}, {"RDNORM", POLLRDNORM}, {"WRNORM", POLLWRNORM}, {"HUP", POLLHUP}, {"NVAL", POLLNVAL},
};
static const struct named select_flags[] = {{"read", 1}, {"write", 2}, {"except", 4}};
static const struct named epoll_flags[] = {
    {"IN", EPOLLIN}, {"OUT", EPOLLOUT},         {"PRI", EPOLLPRI},             {"RDHUP", EPOLLRDHUP},   {"HUP", EPOLLHUP},
    {"ET", EPOLLET}, {"ONESHOT", EPOLLONESHOT}, {"EXCLUSIVE", EPOLLEXCLUSIVE}, {"WAKEUP", EPOLLWAKEUP},
};

#define POLL_SHAPES "usual", "with another", "with another that is ready", "with one that is closed", "twice", "count 0", "count -1", "count beyond the limit", "at null", "at kernel", "at hole", "at fixed"
#define LIMITS "limit of -1", "limit late", "mask", "mask hole", "mask kernel"
#define SELECT_SHAPES "usual", "with another", "with another that is ready", "with one that is closed", "count 0", "count -1", "count INT_MAX", "set hole", "set kernel", "set fixed"
#define EPOLL_SHAPES "usual", "before", "changed", "disarmed", "a copy", "with another", "with another that is ready", "most 0", "most -1", "most INT_MAX", "at null", "at kernel", "at hole", "at fixed", "no set"
static const char *const poll_shapes[] = {POLL_SHAPES};
static const char *const ppoll_shapes[] = {POLL_SHAPES, LIMITS};
static const char *const select_shapes[] = {SELECT_SHAPES, "limit of -1"};
static const char *const pselect_shapes[] = {SELECT_SHAPES, LIMITS};
static const char *const epoll_shapes[] = {EPOLL_SHAPES};
static const char *const epoll_pwait_shapes[] = {EPOLL_SHAPES, "mask", "mask hole", "mask kernel"};
static const char *const epoll_pwait2_shapes[] = {EPOLL_SHAPES, LIMITS, "limit hole"};

static const struct situation waiting[] = {
    {"nothing, data comes", NOTHING, OPEN, SENDS},
    {"nothing, FIN comes", NOTHING, OPEN, ENDS},
    {"nothing, RST comes", NOTHING, OPEN, RESETS},
    {"enough", WHOLE, OPEN, ENDS},
    {"a part, RST comes", PART, OPEN, RESETS},
    {"FIN", NOTHING, PEERS_FIN, RESETS},
    {"a part and FIN", PART, PEERS_FIN, RESETS},
    {"RST", NOTHING, PEERS_RESET, NO_ACT},
    {"a part and RST", PART, PEERS_RESET, NO_ACT},
    {"urgent", URGENT, OPEN, ENDS},
    {"own FIN, data comes", NOTHING, OWN_FIN, SENDS},
    {"own FIN, FIN comes", NOTHING, OWN_FIN, ENDS},
    {"both FINs", NOTHING, PEERS_FIN | OWN_FIN, NO_ACT},
    {"full, peer reads", NOTHING, FULL, READS},
    {"full, RST comes", NOTHING, FULL, RESETS},
};

/* Modes mean limits here: none, none at all, one that is never reached, one that is. */
static int millis_of(const struct play *play)
{
    return play->mode == NONBLOCKING ? 0 : play->mode == LONG ? 100000 : play->mode == SHORT ? 2 : -1;
}

static struct timespec *limit_of(struct play *play, struct timespec *limit)
{
    int millis = millis_of(play);
    *limit = (struct timespec){millis / 1000, millis % 1000 * 1000000};
    if (is_shape(play, "limit of -1"))
        return *limit = (struct timespec){-1, 0}, limit;
    if (is_shape(play, "limit late"))
        return *limit = (struct timespec){0, 1000000000}, limit;
    if (is_shape(play, "limit hole"))
        return (struct timespec *)hole;
    return millis < 0 ? NULL : limit;
}

static const sigset_t *mask_of(struct play *play, sigset_t *mask)
{
    sigemptyset(mask);
    sigaddset(mask, SIGUSR2);
    return is_about(play, "mask") ? (const sigset_t *)address_of(shape_of(play), mask) : NULL;
}

/* The other descriptor, if the call waits for one: a pipe, which is ready if the shape says so. */
static int other_of(struct play *play)
{
    if (is_shape(play, "with another that is ready"))
        CHECK(raw(SYS_write, play->other[1], (long)"p", 1, 0, 0, 0) == 1);
    if (is_shape(play, "with one that is closed"))
        return CLOSED;
    return is_about(play, "with another") ? play->other[0] : -1;
}

enum { WITH_MASK = 1, CHECKED = 2 };

static long polls(struct play *play, int how)
{
    struct pollfd *all = (struct pollfd *)play->buffer;
    struct pollfd *at = is_about(play, "at ") ? (struct pollfd *)address_of(shape_of(play), all) : all;
    struct timespec limit;
    sigset_t mask;
    unsigned long count = is_shape(play, "count 0") ? 0 : is_shape(play, "count -1") ? -1ul : is_shape(play, "count beyond the limit") ? 1ul << 28 : 2;
    int other = other_of(play);
    all[0] = (struct pollfd){.fd = play->fd, .events = play->flags, .revents = 0x7777};
    all[1] = (struct pollfd){.fd = is_shape(play, "twice") ? play->fd : other, .events = POLLIN, .revents = 0x7777};
    const sigset_t *signals = mask_of(play, &mask);
    struct timespec *within = limit_of(play, &limit);
    int millis = millis_of(play);
    long done = how == 0                     ? poll(at, count, millis)
                : how == CHECKED             ? __poll_chk(at, count, millis, -1)
                : how == WITH_MASK           ? ppoll(at, count, within, signals)
                                             : __ppoll_chk(at, count, within, signals, -1);
    say(play, " revents=%hx/%hx", all[0].revents, all[1].revents);
    return done;
}

static long make_poll(struct play *play) { return polls(play, 0); }
static long make_ppoll(struct play *play) { return polls(play, WITH_MASK); }
static long make_poll_chk(struct play *play) { return polls(play, CHECKED); }
static long make_ppoll_chk(struct play *play) { return polls(play, WITH_MASK | CHECKED); }

static long selects(struct play *play, int with_mask)
{
    fd_set sets[3], *given[3];
    struct timespec limit;
    sigset_t mask;
    int fd = play->fd, other = other_of(play), highest = fd > other ? fd : other;
    int count = is_shape(play, "count 0") ? 0 : is_shape(play, "count -1") ? -1 : is_shape(play, "count INT_MAX") ? INT_MAX : highest + 1;
    for (int at = 0; at < 3; at++) {
        FD_ZERO(&sets[at]);
        if (play->flags >> at & 1)
            FD_SET(fd, &sets[at]);
        given[at] = play->flags >> at & 1 ? &sets[at] : NULL;
    }
    if (other >= 0)
        FD_SET(other, &sets[0]), given[0] = &sets[0];
    if (is_about(play, "set "))
        given[0] = (fd_set *)address_of(shape_of(play), &sets[0]);
    struct timespec *within = limit_of(play, &limit);
    const sigset_t *signals = mask_of(play, &mask);
    struct timeval short_limit = {within ? within->tv_sec : 0, within ? within->tv_nsec / 1000 : 0};
    long done = with_mask ? pselect(count, given[0], given[1], given[2], within, signals)
                          : select(count, given[0], given[1], given[2], within ? &short_limit : NULL);
    say(play, " sets=%d/%d/%d/%d", FD_ISSET(fd, &sets[0]) != 0, FD_ISSET(fd, &sets[1]) != 0, FD_ISSET(fd, &sets[2]) != 0,
        other >= 0 && FD_ISSET(other, &sets[0]));
    return done;
}

static long make_select(struct play *play) { return selects(play, 0); }
static long make_pselect(struct play *play) { return selects(play, 1); }

/* Puts the connection into the set, as the shape says. The result of the last epoll_ctl is part of the case's. */
static void put_into_set(struct play *play)
{
    struct epoll_event event = {.events = play->flags, .data.u64 = 77}, nothing = {.data.u64 = 1}, pipe = {.events = EPOLLIN, .data.u64 = 88};
    int changes = is_shape(play, "changed") || is_shape(play, "disarmed"), fd = play->fd, other = other_of(play);
    if (is_shape(play, "a copy"))
        CHECK((fd = play->extra = dup(play->fd)) >= 0);
    int done = epoll_ctl(play->set, EPOLL_CTL_ADD, fd, is_shape(play, "changed") ? &nothing : &event);
    if (changes && done == 0)
        done = epoll_ctl(play->set, EPOLL_CTL_MOD, fd, is_shape(play, "changed") ? &event : &nothing);
    say(play, " put=%d", done == 0 ? 0 : errno);
    if (other >= 0)
        CHECK(epoll_ctl(play->set, EPOLL_CTL_ADD, other, &pipe) == 0);
}

static void arm_set(struct play *play)
{
    if (is_shape(play, "before"))
        put_into_set(play);
}

static void say_events(struct play *play, long done, const struct epoll_event *events)
{
    for (long at = 0; at < done && at < 3; at++)
        say(play, " %x/%lu", events[at].events, (unsigned long)events[at].data.u64);
}

enum which { WAIT, PWAIT, PWAIT2 };

static long waits_once(struct play *play, enum which which, int set, struct epoll_event *events, int most, int millis, struct timespec *limit)
{
    sigset_t mask;
    const sigset_t *signals = mask_of(play, &mask);
    if (which == WAIT)
        return epoll_wait(set, events, most, millis);
    return which == PWAIT ? epoll_pwait(set, events, most, millis, signals) : epoll_pwait2(set, events, most, limit, signals);
}

/* Waits, then looks again: what is level-triggered is still reported. */
static long waits_for_events(struct play *play, enum which which)
{
    struct epoll_event *all = (struct epoll_event *)play->buffer;
    struct epoll_event *at = is_about(play, "at ") ? (struct epoll_event *)address_of(shape_of(play), all) : all;
    int most = is_shape(play, "most 0") ? 0 : is_shape(play, "most -1") ? -1 : is_shape(play, "most INT_MAX") ? INT_MAX : 4, set = play->set;
    struct timespec limit, none = {0, 0};
    if (!is_shape(play, "before"))
        put_into_set(play);
    if (is_shape(play, "no set"))
        set = play->fd;
    long done = waits_once(play, which, set, at, most, millis_of(play), limit_of(play, &limit));
    int number = errno;
    say_events(play, done, all);
    if (done > 0) {
        done = waits_once(play, which, set, all, 4, 0, &none);
        say(play, " again=%ld", done);
        say_events(play, done, all);
        memset(all, 0, sizeof *all * 4);
    }
    errno = number;
    return done;
}

static long make_epoll_wait(struct play *play) { return waits_for_events(play, WAIT); }
static long make_epoll_pwait(struct play *play) { return waits_for_events(play, PWAIT); }
static long make_epoll_pwait2(struct play *play) { return waits_for_events(play, PWAIT2); }

#define WAITS(name, make, flags, shapes, arm) \
    {name, make, flags, COUNT(flags), 1, shapes, COUNT(shapes), 0, 1 << BLOCKING | 1 << NONBLOCKING | 1 << LONG | 1 << SHORT, waiting, COUNT(waiting), arm}

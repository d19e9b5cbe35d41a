/* A case of the matrix: which call, with what, on a connection that has been through what; and what came of it. */

#pragma once
#include "../sockets.h"
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

/* Some of the arguments are wrong, as the compiler sees. */
#pragma GCC diagnostic ignored "-Wnonnull"
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#pragma GCC diagnostic ignored "-Wstringop-overread"
#pragma GCC diagnostic ignored "-Warray-bounds"
#pragma GCC diagnostic ignored "-Wformat-truncation"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* What a call asks for; what is there, if there is enough or only a part; what comes to end a wait. */
enum { WANTED = 10, ENOUGH = 12, PARTLY = 4, COMES = 12, LOWAT = 7 };
/* A call for more than the queues of a full connection hold. */
enum { MUCH = 1 << 18, FULL_QUEUE = 1 << 16 };
enum { MANY = 1100, ROOM = 4096 };
/* Numbers of no descriptors, which the smallest table of descriptors has. */
enum { CLOSED = 50, FREE = 51 };
/* Until a thread counts as hanging, in seconds. */
enum { PATIENCE = 10 };

/* How long a call may wait. A long limit is never reached; a short one is. */
enum mode { BLOCKING, NONBLOCKING, LONG, SHORT, LOW_WATER, MODES };
static const char *const mode_names[] = {"blocking", "non-blocking", "long-limit", "short-limit", "low-water"};

/* What has come before the call. */
enum { NOTHING, PART, WHOLE, URGENT };
/* How the peer, or the connection's own end, has gone on. */
enum { OPEN = 0, PEERS_FIN = 1, PEERS_RESET = 2, OWN_FIN = 4, FULL = 8 };
/* What the peer does when the call waits. */
enum act { NO_ACT, SENDS, ENDS, RESETS, READS, INTERRUPTS };

struct situation {
    const char *name;
    int there, after;
    enum act act;
};

struct named {
    const char *name;
    long value;
};

struct play;

struct call {
    const char *name;
    long (*make)(struct play *);
    /* Flags: none, each one alone, and in pairs. Without `pairs` a case has exactly one of them (an option, a command). */
    const struct named *flags;
    int flag_count, pairs;
    /* Ways to give arguments. The first one is as usual. */
    const char *const *shapes;
    int shape_count;
    int sends;
    int modes; /* a bit each */
    const struct situation *situations;
    int situation_count;
    /* A call that waits for events: it is armed before anything comes. */
    void (*arm)(struct play *);
};

/* One case. Each has memory of its own: a thread that never returns may use it. */
struct play {
    int number;
    const struct call *call;
    int flags, shape;
    enum mode mode;
    const struct situation *situation;
    int fd, peer, set, other[2], extra;
    int peer_has_ended, is_joined;
    size_t filled;
    pthread_t thread;
    pid_t id;
    sigjmp_buf back;
    atomic_int begun, over, faulted;
    long result;
    int error, pipes;
    char said[600]; /* what the call has written to its arguments */
    int said_length;
    char buffer[ROOM], name[256], control[256];
    struct iovec pieces[MANY];
    struct msghdr message;
    struct mmsghdr messages[MANY];
    char *much;
};

/* Addresses: null, of the kernel's, in a page without access, in one that can only be read, before one without. */
static char *const kernels = (char *)-4096, *hole, *fixed, *edge;
static int file, listener;
/* For calls that send much, and in a file. */
static char digits_for_ever[MUCH];
static const char digits[] = "0123456789";
static struct sockaddr_in listens;
static __thread struct play *playing;

static void say(struct play *play, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    play->said_length += vsnprintf(play->said + play->said_length, sizeof play->said - play->said_length, format, list);
    va_end(list);
    if (play->said_length >= (int)sizeof play->said)
        play->said_length = sizeof play->said - 1;
}

static unsigned hash(unsigned all, const void *bytes, size_t size)
{
    for (size_t at = 0; at < size; at++)
        all = all * 31 + ((const unsigned char *)bytes)[at];
    return all;
}

/* A system call that the library does not see: peers are the kernel's in every column. Returns the errno negated if it fails. */
static long raw(long number, long a, long b, long c, long d, long e, long f)
{
    long done;
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    register long sixth __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(done)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return done;
}

static long raw_send(int fd, const void *bytes, size_t size, int flags)
{
    return raw(SYS_sendto, fd, (long)bytes, size, flags | MSG_NOSIGNAL, 0, 0);
}

static long raw_receive(int fd, void *bytes, size_t size, int flags)
{
    return raw(SYS_recvfrom, fd, (long)bytes, size, flags, 0, 0);
}

static void raw_option(int fd, int level, int option, const void *value, socklen_t size)
{
    CHECK(raw(SYS_setsockopt, fd, level, option, (long)value, size, 0) == 0);
}

/* The address that a shape names; `otherwise` if it names none. */
static char *address_of(const char *shape, void *otherwise)
{
    const char *end = strrchr(shape, ' ');
    end = end ? end + 1 : shape;
    if (strcmp(end, "null") == 0)
        return NULL;
    if (strcmp(end, "kernel") == 0)
        return kernels;
    if (strcmp(end, "hole") == 0)
        return hole;
    if (strcmp(end, "fixed") == 0)
        return fixed;
    if (strcmp(end, "edge") == 0)
        return edge;
    return otherwise;
}

static const char *shape_of(const struct play *play)
{
    return play->call->shapes[play->shape];
}

static int is_shape(const struct play *play, const char *name)
{
    return strcmp(shape_of(play), name) == 0;
}

/* Whether a shape is about this argument: its name begins with it. */
static int is_about(const struct play *play, const char *argument)
{
    return strncmp(shape_of(play), argument, strlen(argument)) == 0;
}

/* Whether how much fits decides the result, which is the queues' affair. */
static int is_about_room(const struct play *play)
{
    int is_large = is_shape(play, "much") || is_shape(play, "length -1") || is_shape(play, "length SSIZE_MAX") || is_shape(play, "length INT_MAX") ||
                   is_shape(play, "pieces SSIZE_MAX");
    return play->situation->after & FULL || (play->call->sends && is_large);
}

/* An amount that is sent, as far as it can be compared. */
static long amount(const struct play *play, long sent)
{
    return is_about_room(play) ? sent > 0 : sent;
}

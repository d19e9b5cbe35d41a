/* Calls with arguments that the kernel refuses, or takes although they look wrong. Usage: arguments [caught] [pass | moved]
 *
 * Prints a line for each call: the call, its result and errno, and what it has done to the connection and to what its arguments point to.
 * With "pass" the descriptor is that of a socket that is no connection of TCP's, else that of an accepted connection, with "moved" of one on
 * the NIC. With "caught" the program has a handler for SIGSEGV. */

#include "sockets.h"
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <time.h>

/* The compiler sees that they are wrong. */
#pragma GCC diagnostic ignored "-Wnonnull"
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#pragma GCC diagnostic ignored "-Wstringop-overread"
#pragma GCC diagnostic ignored "-Warray-bounds"

#define ROOM 4096

/* Addresses: null, in the first page, of the kernel's, in a page without access, in one that can only be read, and before one without. */
static char *const null_page = (char *)16, *const kernels = (char *)-4096, *hole, *shut, *fixed, *edge;
static char buffer[ROOM], name[128], control[128];
static int fd, peer, epoll, listener, file, zero, some, unix_ends[2];
static int caught, moved, pass;
static struct iovec vectors[1100], wide[2];
static struct msghdr message;
static struct mmsghdr messages[3];
static struct timespec a_moment = {0, 1000000}, minus = {-1, 0}, early = {0, -1}, late = {0, 1000000000}, long_ago = {-5, -5};
static struct timeval minus_tv = {-1, 0}, minus_micros = {0, -1}, much = {0, 2000000}, nothing_tv;
static struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77}, events[8];
static struct pollfd polled[2];
static fd_set set;
static socklen_t length, minus_length = -1;
static sigset_t signals;
static loff_t offset, minus_offset = -1;

static struct iovec *two(void *first, size_t first_length, void *second, size_t second_length)
{
    wide[0] = (struct iovec){first, first_length};
    wide[1] = (struct iovec){second, second_length};
    return wide;
}

static struct iovec *many(int count)
{
    for (int at = 0; at < count; at++)
        vectors[at] = (struct iovec){buffer + at, 1};
    return vectors;
}

static struct msghdr *to(struct iovec *pieces, size_t count)
{
    message = (struct msghdr){.msg_iov = pieces, .msg_iovlen = count};
    return &message;
}

static struct msghdr *with_name(void *where, socklen_t size)
{
    to(two(buffer, 3, NULL, 0), 2);
    message.msg_name = where;
    message.msg_namelen = size;
    return &message;
}

static struct msghdr *with_control(void *where, size_t size)
{
    to(two(buffer, 3, NULL, 0), 2);
    message.msg_control = where;
    message.msg_controllen = size;
    return &message;
}

static struct mmsghdr *several(struct iovec *first, struct iovec *second)
{
    memset(messages, 0, sizeof messages);
    messages[0].msg_hdr = (struct msghdr){.msg_iov = first, .msg_iovlen = 1};
    messages[1].msg_hdr = (struct msghdr){.msg_iov = second, .msg_iovlen = 1};
    messages[2].msg_hdr = (struct msghdr){.msg_iov = second, .msg_iovlen = 1};
    return messages;
}

static struct iovec *one(void *where, size_t size)
{
    static struct iovec some_of[4];
    static int at;
    at = (at + 1) % 4;
    some_of[at] = (struct iovec){where, size};
    return &some_of[at];
}

static struct pollfd *entry(short wanted)
{
    polled[0] = (struct pollfd){.fd = fd, .events = wanted, .revents = -1};
    polled[1] = (struct pollfd){.fd = -5, .revents = -1};
    return polled;
}

static fd_set *only(void)
{
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return &set;
}

static socklen_t *sized(socklen_t value)
{
    length = value;
    return &length;
}

static int *value(int number)
{
    some = number;
    return &some;
}

/* The calls. Numbers that look like a pointer's are addresses from above. */
static long play(int number, const char **text)
{
    switch (number) {
#define ON(...) \
    case __COUNTER__: \
        *text = #__VA_ARGS__; \
        return (long)(__VA_ARGS__);
#define BAD(call) call(NULL) call(null_page) call(kernels) call(hole)
#define RECEIVES(at) ON(read(fd, at, 3)) ON(recv(fd, at, 3, 0)) ON(recv(fd, at, 3, MSG_PEEK)) ON(recv(fd, at, 3, MSG_WAITALL)) ON(recvfrom(fd, at, 3, 0, NULL, NULL)) ON(recvfrom(fd, buffer, 3, 0, (struct sockaddr *)at, sized(16))) ON(recvfrom(fd, buffer, 3, 0, (struct sockaddr *)name, (socklen_t *)at)) ON(readv(fd, (struct iovec *)at, 1)) ON(readv(fd, two(at, 2, buffer, 2), 2)) ON(readv(fd, two(buffer, 2, at, 2), 2)) ON(readv(fd, two(at, 0, buffer, 3), 2)) ON(recvmsg(fd, (struct msghdr *)at, 0)) ON(recvmsg(fd, to((struct iovec *)at, 1), 0)) ON(recvmsg(fd, to(two(at, 2, buffer, 2), 2), 0)) ON(recvmsg(fd, with_name(at, 16), 0)) ON(recvmsg(fd, with_control(at, 64), 0)) ON(recvmmsg(fd, (struct mmsghdr *)at, 1, 0, NULL)) ON(recvmmsg(fd, several(one(at, 2), one(buffer, 2)), 2, 0, NULL)) ON(recvmmsg(fd, several(one(buffer, 2), one(at, 2)), 2, 0, NULL)) ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 2)), 1, 0, (struct timespec *)at))
#define RECEIVES_FIXED(at) ON(read(fd, at, 3)) ON(recv(fd, at, 3, 0)) ON(readv(fd, two(at, 2, buffer, 2), 2)) ON(recvmsg(fd, to(two(at, 2, buffer, 2), 2), 0))
        BAD(RECEIVES)
        RECEIVES_FIXED(fixed)
        RECEIVES_FIXED(edge)
        ON(read(fd, NULL, 0))
        ON(read(fd, hole, 0))
        ON(recv(fd, NULL, 0, MSG_DONTWAIT))
        ON(recv(fd, hole, 0, MSG_DONTWAIT))
        ON(recv(fd, NULL, 3, MSG_TRUNC))
        ON(recv(fd, hole, 3, MSG_TRUNC))
        ON(recv(fd, hole, 3, MSG_TRUNC | MSG_PEEK))
        ON(read(fd, buffer, -1))
        ON(read(fd, buffer, SSIZE_MAX))
        ON(recv(fd, buffer, -1, 0))
        ON(recv(fd, buffer, SSIZE_MAX, 0))
        ON(recv(fd, buffer, INT_MAX, 0))
        ON(recvfrom(fd, buffer, -1, 0, NULL, NULL))
        ON(recvfrom(fd, buffer, 3, 0, (struct sockaddr *)name, sized(-1)))
        ON(recvfrom(fd, buffer, 3, 0, (struct sockaddr *)name, sized(0)))
        ON(recvfrom(fd, buffer, 3, 0, (struct sockaddr *)name, sized(128)))
        ON(readv(fd, many(3), -1))
        ON(readv(fd, many(3), 0))
        ON(readv(fd, many(1025), 1025))
        ON(readv(fd, many(1024), 1024))
        ON(readv(fd, two(buffer, 3, buffer, -1), 2))
        ON(readv(fd, two(buffer, SSIZE_MAX, buffer, SSIZE_MAX), 2))
        ON(readv(fd, two(NULL, 0, NULL, 0), 2))
        ON(recvmsg(fd, to(many(1025), 1025), 0))
        ON(recvmsg(fd, to(many(1024), 1024), 0))
        ON(recvmsg(fd, to(NULL, 0), MSG_DONTWAIT))
        ON(recvmsg(fd, to(NULL, -1), 0))
        ON(recvmsg(fd, to(two(buffer, 3, buffer, -1), 2), 0))
        ON(recvmsg(fd, to(two(buffer, SSIZE_MAX, buffer, SSIZE_MAX), 2), 0))
        ON(recvmsg(fd, with_name(name, -1), 0))
        ON(recvmsg(fd, with_name(name, INT_MAX), 0))
        ON(recvmsg(fd, with_control(control, 1), 0))
        ON(recvmsg(fd, with_control(control, -1), 0))
        ON(recvmmsg(fd, NULL, 0, 0, NULL))
        ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 2)), 2, 0, &minus))
        ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 2)), 2, 0, &early))
        ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 2)), 2, 0, &late))
        ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 2)), 2, 0, &long_ago))
        ON(recvmmsg(fd, several(one(buffer, 2), one(buffer, 1)), -1, MSG_DONTWAIT, NULL))
        ON(recvmmsg(fd, several(one(buffer, -1), one(buffer, 1)), 2, MSG_DONTWAIT, NULL))
        ON(recv(fd, buffer, 3, 0x00800000 | MSG_DONTWAIT))
        ON(recv(fd, buffer, 3, MSG_CTRUNC))
        ON(recv(fd, buffer, 3, -1))
#define SENDS(at) ON(write(fd, at, 3)) ON(send(fd, at, 3, 0)) ON(sendto(fd, at, 3, 0, NULL, 0)) ON(sendto(fd, buffer, 3, 0, (struct sockaddr *)at, 16)) ON(writev(fd, (struct iovec *)at, 1)) ON(writev(fd, two(at, 2, buffer, 2), 2)) ON(writev(fd, two(buffer, 2, at, 2), 2)) ON(writev(fd, two(at, 0, buffer, 3), 2)) ON(sendmsg(fd, (struct msghdr *)at, 0)) ON(sendmsg(fd, to((struct iovec *)at, 1), 0)) ON(sendmsg(fd, to(two(at, 2, buffer, 2), 2), 0)) ON(sendmsg(fd, to(two(buffer, 2, at, 2), 2), 0)) ON(sendmsg(fd, with_name(at, 16), 0)) ON(sendmsg(fd, with_control(at, 64), 0)) ON(sendmmsg(fd, (struct mmsghdr *)at, 1, 0)) ON(sendmmsg(fd, several(one(at, 2), one(buffer, 2)), 2, 0)) ON(sendmmsg(fd, several(one(buffer, 2), one(at, 2)), 2, 0)) ON(sendfile(fd, file, (off_t *)at, 3))
        BAD(SENDS)
        ON(write(fd, edge, 3))
        ON(send(fd, edge, 3, 0))
        ON(writev(fd, two(buffer, 2, edge, 3), 2))
        ON(write(fd, NULL, 0))
        ON(write(fd, hole, 0))
        ON(send(fd, NULL, 0, 0))
        ON(write(fd, buffer, -1))
        ON(send(fd, buffer, -1, MSG_DONTWAIT))
        ON(send(fd, buffer, SSIZE_MAX, MSG_DONTWAIT) > 0)
        ON(sendto(fd, buffer, 3, 0, (struct sockaddr *)name, -1))
        ON(sendto(fd, buffer, 3, 0, (struct sockaddr *)name, 0))
        ON(sendto(fd, buffer, 3, 0, (struct sockaddr *)name, 4000))
        ON(writev(fd, many(3), -1))
        ON(writev(fd, many(3), 0))
        ON(writev(fd, many(1025), 1025))
        ON(writev(fd, many(1024), 1024))
        ON(writev(fd, two(buffer, 3, buffer, -1), 2))
        ON(writev(fd, two(NULL, 0, NULL, 0), 2))
        ON(sendmsg(fd, to(many(1025), 1025), 0))
        ON(sendmsg(fd, to(many(1024), 1024), 0))
        ON(sendmsg(fd, to(NULL, 0), 0))
        ON(sendmsg(fd, to(NULL, -1), 0))
        ON(sendmsg(fd, to(two(buffer, 3, buffer, -1), 2), 0))
        ON(sendmsg(fd, with_name(name, -1), 0))
        ON(sendmsg(fd, with_control(control, 1), 0))
        ON(sendmsg(fd, with_control(control, -1), 0))
        ON(sendmsg(fd, with_control(control, sizeof control), 0))
        ON(sendmmsg(fd, NULL, 0, 0))
        ON(sendmmsg(fd, several(one(buffer, 2), one(buffer, -1)), 2, 0))
        ON(sendfile(fd, file, NULL, 0))
        ON(sendfile(fd, file, &minus_offset, 3))
        ON(sendfile(fd, file, NULL, -1))
        ON(sendfile(fd, -1, NULL, 3))
        ON(sendfile(fd, epoll, NULL, 3))
        ON(splice(file, (loff_t *)hole, fd, NULL, 3, 0))
        ON(preadv2(fd, two(buffer, 3, NULL, 0), 2, -1, 0x40000000))
        ON(preadv2(fd, (struct iovec *)hole, 2, -1, 0))
        ON(pwritev2(fd, two(buffer, 3, NULL, 0), 2, -1, 0x40000000))
#define WAITS(at) ON(poll((struct pollfd *)at, 1, 0)) ON(poll((struct pollfd *)at, 0, 0)) ON(ppoll((struct pollfd *)at, 1, &a_moment, NULL)) ON(ppoll(entry(POLLIN), 2, &a_moment, (sigset_t *)at)) ON(select(fd + 1, (fd_set *)at, NULL, NULL, &nothing_tv)) ON(select(fd + 1, NULL, (fd_set *)at, only(), &nothing_tv)) ON(select(0, (fd_set *)at, NULL, NULL, &nothing_tv)) ON(pselect(fd + 1, (fd_set *)at, NULL, NULL, &a_moment, NULL)) ON(pselect(fd + 1, only(), NULL, NULL, &a_moment, (sigset_t *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, (struct epoll_event *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_DEL, fd, (struct epoll_event *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_ctl(epoll, EPOLL_CTL_MOD, fd, (struct epoll_event *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, (struct epoll_event *)at, 1, 0)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait(epoll, (struct epoll_event *)at, 1, 0, NULL)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait(epoll, events, 8, 0, (sigset_t *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, events, 8, (struct timespec *)at, NULL)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, events, 8, &a_moment, (sigset_t *)at)) ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, (struct epoll_event *)at, 8, &a_moment, NULL))
        BAD(WAITS)
        ON(poll((struct pollfd *)fixed, 1, 0))
        ON(poll(entry(POLLIN), -1, 0))
        ON(poll(entry(POLLIN), 1 << 28, 0))
        ON(poll(entry(POLLIN), 2, INT_MIN))
        ON(ppoll(entry(POLLIN), 2, &minus, NULL))
        ON(ppoll(entry(POLLIN), 2, &early, NULL))
        ON(ppoll(entry(POLLIN), 2, &late, NULL))
        ON(ppoll(NULL, 0, &minus, NULL))
        ON(ppoll(NULL, 0, &late, NULL))
        ON(ppoll(entry(POLLIN), 1 << 28, &late, NULL))
        ON(select(-1, only(), NULL, NULL, &nothing_tv))
        ON(select(-1, NULL, NULL, NULL, &minus_tv))
        ON(select(fd + 1, only(), NULL, NULL, &minus_tv))
        ON(select(fd + 1, only(), NULL, NULL, &minus_micros))
        ON(select(fd + 1, only(), NULL, NULL, &much))
        ON(pselect(-1, only(), NULL, NULL, &a_moment, NULL))
        ON(pselect(fd + 1, only(), NULL, NULL, &minus, NULL))
        ON(pselect(fd + 1, only(), NULL, NULL, &late, NULL))
        ON(pselect(0, NULL, NULL, NULL, &late, NULL))
        ON(epoll_ctl(epoll, 0, fd, &event))
        ON(epoll_ctl(epoll, 9, fd, &event))
        ON(epoll_ctl(epoll, 9, fd, NULL))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, epoll, &event))
        ON(epoll_ctl(fd, EPOLL_CTL_ADD, fd, &event))
        ON(epoll_ctl(fd, EPOLL_CTL_ADD, epoll, &event))
        ON(epoll_ctl(file, EPOLL_CTL_ADD, fd, &event))
        ON(epoll_ctl(-1, EPOLL_CTL_ADD, fd, &event))
        ON(epoll_ctl(-1, EPOLL_CTL_ADD, fd, (struct epoll_event *)hole))
        ON(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event))
        ON(epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, events, 0, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, events, -1, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, events, INT_MAX, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, events, INT_MAX / 12, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(epoll, NULL, 0, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_wait(fd, events, 1, 0))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait(epoll, events, 8, INT_MIN, &signals))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, events, 8, &minus, NULL))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, events, 8, &late, NULL))
        ON(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) + epoll_pwait2(epoll, events, 0, &late, NULL))
#define NAMES(at) ON(getsockname(fd, (struct sockaddr *)at, sized(128))) ON(getsockname(fd, (struct sockaddr *)name, (socklen_t *)at)) ON(getpeername(fd, (struct sockaddr *)at, sized(128))) ON(getpeername(fd, (struct sockaddr *)name, (socklen_t *)at)) ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, at, sized(4))) ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, &some, (socklen_t *)at)) ON(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, at, sized(4))) ON(getsockopt(fd, IPPROTO_TCP, TCP_INFO, at, sized(104))) ON(getsockopt(fd, IPPROTO_TCP, TCP_CORK, &some, (socklen_t *)at)) ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, at, 4)) ON(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, at, 4)) ON(setsockopt(fd, IPPROTO_TCP, TCP_CORK, at, 4)) ON(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, at, 4)) ON(setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, at, 4)) ON(ioctl(fd, FIONREAD, at)) ON(ioctl(fd, TIOCOUTQ, at)) ON(ioctl(fd, FIONBIO, at)) ON(connect(fd, (struct sockaddr *)at, 16)) ON(accept(listener, (struct sockaddr *)at, sized(16)) >= 0) ON(accept(listener, (struct sockaddr *)name, (socklen_t *)at) >= 0) ON(accept4(listener, (struct sockaddr *)at, sized(16), SOCK_NONBLOCK) >= 0) ON(accept(fd, (struct sockaddr *)at, sized(16)) >= 0)
        BAD(NAMES)
        ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, fixed, sized(4)))
        ON(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, fixed, sized(4)))
        ON(ioctl(fd, FIONREAD, fixed))
        ON(getsockname(fd, (struct sockaddr *)name, &minus_length))
        ON(getpeername(fd, (struct sockaddr *)name, &minus_length))
        ON(getsockname(fd, (struct sockaddr *)name, sized(0)))
        ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, &some, sized(-1)))
        ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, &some, sized(0)))
        ON(getsockopt(fd, SOL_SOCKET, SO_ERROR, &some, sized(1)))
        ON(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &some, sized(-1)))
        ON(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &some, sized(2)))
        ON(getsockopt(fd, IPPROTO_TCP, TCP_CORK, &some, sized(-1)))
        ON(getsockopt(fd, IPPROTO_TCP, TCP_INFO, buffer, sized(-1)))
        ON(getsockopt(fd, IPPROTO_TCP, TCP_INFO, buffer, sized(1)))
        ON(getsockopt(fd, IPPROTO_TCP, 999, &some, sized(4)))
        ON(getsockopt(fd, 999, 1, &some, sized(4)))
        ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value(1), 0))
        ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value(1), 3))
        ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value(1), -1))
        ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value(7), 4) + getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &some, sized(4)))
        ON(setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value(1), 400))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_CORK, value(1), -1))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_CORK, value(1), 3))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_CORK, value(7), 4) + getsockopt(fd, IPPROTO_TCP, TCP_CORK, &some, sized(4)))
        ON(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, value(-1), 4))
        ON(setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, value(0), 4))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, value(0), 4))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, value(1000), 4))
        ON(setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, value(-1), 4))
        ON(setsockopt(fd, IPPROTO_TCP, 999, value(1), 4))
        ON(setsockopt(fd, 999, 1, value(1), 4))
        ON(setsockopt(fd, 999, 1, hole, 4))
        ON(ioctl(fd, 0x12345, hole))
        ON(ioctl(fd, FIOASYNC, hole))
        ON(shutdown(fd, 3))
        ON(shutdown(fd, -1))
        ON(connect(fd, (struct sockaddr *)name, 0))
        ON(connect(fd, (struct sockaddr *)name, 1))
        ON(connect(fd, (struct sockaddr *)name, -1))
        ON(connect(fd, (struct sockaddr *)name, 4000))
        ON(accept(listener, (struct sockaddr *)name, &minus_length) >= 0)
        ON(accept(listener, NULL, (socklen_t *)hole) >= 0)
        ON(accept4(listener, NULL, NULL, 0x40) >= 0)
        ON(accept4(listener, (struct sockaddr *)hole, (socklen_t *)hole, 0x40) >= 0)
        ON(accept(fd, NULL, NULL))
        ON(accept4(fd, NULL, NULL, 0x40))
        ON(listen(fd, 1))
        ON(fcntl(fd, F_SETFL, -1))
        ON(fcntl(fd, 9999, hole))
        ON(fcntl(fd, F_DUPFD, -1))
        ON(fcntl(fd, F_GETLK, hole))
        ON(dup3(fd, fd, 0))
        ON(dup3(fd, fd + 30, 1))
        ON(dup2(fd, -1))
        ON(close_range(fd + 40, fd + 30, 0))
        ON(close_range(900, 901, 0x40000000))
        ON(socket(AF_INET, SOCK_STREAM | 0x100000, 0))
        ON(socket(AF_INET, SOCK_STREAM, -1))
        ON(epoll_create(0))
        ON(epoll_create(-1))
        ON(epoll_create1(1))
#undef ON
    }
    return LONG_MIN;
}

static sigjmp_buf back;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info, (void)context;
    siglongjmp(back, 1);
}

static unsigned sum(const void *bytes, size_t size)
{
    unsigned all = 0;
    for (size_t at = 0; at < size; at++)
        all = all * 31 + ((const unsigned char *)bytes)[at];
    return all;
}

/* A connection for one call, with some bytes to receive. */
static void prepare(void)
{
    struct pair pair;
    if (pass) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, unix_ends) == 0);
        pair = (struct pair){unix_ends[0], unix_ends[1]};
    } else {
        pair = connect_pair();
    }
    fd = pair.server, peer = pair.client;
    if (moved) {
        exchange(pair.client, pair.server, "first\n");
        exchange(pair.server, pair.client, "second\n");
        until_on_nic(fd);
    }
    CHECK(write(peer, "hello", 5) == 5);
    CHECK(poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1) == 1);
    struct sockaddr_in inet = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof inet;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&inet, size) == 0 && listen(listener, 4) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&inet, &size) == 0);
    zero = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(zero, (struct sockaddr *)&inet, size) == 0);
    CHECK((epoll = epoll_create1(0)) >= 0);
    memset(buffer, 'b', sizeof buffer);
    memset(name, 0, sizeof name);
    memset(control, 0, sizeof control);
    memset(events, 0, sizeof events);
    message = (struct msghdr){0};
    memset(messages, 0, sizeof messages);
    memset(polled, 0, sizeof polled);
    FD_ZERO(&set);
    memcpy(edge, "xy", 2);
    some = length = 0;
    minus_length = -1, minus_offset = -1;
    nothing_tv = (struct timeval){0, 0}, minus_tv = (struct timeval){-1, 0}, minus_micros = (struct timeval){0, -1}, much = (struct timeval){0, 2000000};
    offset = 0;
    CHECK(lseek(file, 0, SEEK_SET) == 0);
}

/* What is left to receive at both ends. */
static void report_queues(void)
{
    int here = -1, there = -1, flags = fcntl(fd, F_GETFL);
    ioctl(fd, FIONREAD, &here);
    /* What was sent arrives in its own time: it is received up to a last byte. */
    fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_CORK, &(int){0}, sizeof(int));
    char last = '!';
    there = 0;
    if (write(fd, &last, 1) == 1) {
        static char got[1 << 20];
        for (ssize_t more; (more = read(peer, got, sizeof got)) > 0;) {
            there += more;
            if (got[more - 1] == '!')
                break;
        }
    }
    printf(" unread %d sent %d flags %x at %ld\n", here, there, flags, (long)lseek(file, 0, SEEK_CUR));
}

static void finish(void)
{
    close(fd), close(peer), close(listener), close(zero), close(epoll);
}

int main(int count, char **arguments)
{
    for (int at = 1; at < count; at++) {
        caught |= strcmp(arguments[at], "caught") == 0;
        moved |= strcmp(arguments[at], "moved") == 0;
        pass |= strcmp(arguments[at], "pass") == 0;
    }
    alarm(STANDS_STILL);
    setvbuf(stdout, NULL, _IONBF, 0);
    signal(SIGPIPE, SIG_IGN);
    hole = mmap(NULL, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    shut = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(hole != MAP_FAILED && shut != MAP_FAILED);
    edge = shut + 4096 - 2;
    CHECK(mprotect(shut + 4096, 4096, PROT_NONE) == 0);
    fixed = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK((file = open("/proc/self/exe", O_RDONLY)) >= 0);
    if (caught) {
        struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
        CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    }
    for (int number = 0;; number++) {
        const char *text = "";
        volatile long result = 0;
        prepare();
        errno = 0;
        if (sigsetjmp(back, 1) == 0)
            result = play(number, &text);
        else
            result = 0, errno = 9999, play(-1, &text);
        if (result == LONG_MIN)
            break;
        printf("%d %s = %ld (%d) %x %u", number, text, result, errno < 0 ? 0 : result < 0 || errno == 9999 ? errno : 0, sum(buffer, sizeof buffer), sum(name, 2));
        printf(" length %d some %d message %d %zu %x several %u %u poll %hd %hd set %d events %u %lu", length, some, message.msg_namelen, message.msg_controllen, message.msg_flags, messages[0].msg_len, messages[1].msg_len, polled[0].revents, polled[1].revents, FD_ISSET(fd, &set) != 0, events[0].events, events[0].data.u64);
        report_queues();
        finish();
    }
    return 0;
}

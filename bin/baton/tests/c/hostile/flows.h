/* Threads that read all that a peer sends, and write all that it gets, each by calls that are drawn. A signal handler may leave a call, or
 * the thread may be cancelled in it: what has arrived in the buffer by then is what the call has received. */

#include "raw.h"
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/uio.h>

#define PIECES 3
#define ROOM 16384

struct flow {
    struct connection *connection;
    struct random random;
    pthread_t thread;
    int writes, is_stream, is_real_time, pipe[2], set, in_set;
    size_t at, total;
    /* The call under way: its length, and whether what is in the buffer was received for good. */
    volatile size_t asked;
    volatile int peeks;
    struct iovec pieces[PIECES];
    int piece_count;
    /* How a handler leaves the call, if it may. */
    sigjmp_buf back;
    volatile sig_atomic_t may_leave;
    volatile int is_done;
    /* Whether a stream has its own number of the connection. */
    volatile int has_copy;
    /* A thread is either cancelled or leaves a call: natively, too, a jump that comes between loses the cancellation. */
    _Atomic int is_cancelled, is_leaving;
    /* Whether the connection was seen on the NIC. */
    volatile int was_on_nic;
    const char *volatile now, *waited;
    unsigned char buffer[ROOM];
};

static __thread struct flow *mine;

/* Makes a call that handlers may leave, and in which the thread can be cancelled. */
#define LEAVABLE(flow, call) \
    ({ \
        int state; \
        (flow)->now = #call; \
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state); \
        (flow)->may_leave = 1; \
        ssize_t done_by = (call); \
        (flow)->may_leave = 0; \
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); \
        done_by; \
    })

/* One that they must not leave, since nobody could say what it has done. */
#define WHOLE(flow, call) ((flow)->now = #call, (call))

/* What a call may fail with natively: it was interrupted, there is nothing, or another thread has put another descriptor there. */
static inline int is_passing(ssize_t done)
{
    return done < 0 && (errno == EINTR || errno == EAGAIN || errno == EBADF);
}

static void say(const char *text)
{
    RAW3(SYS_write, 2, text, strlen(text));
}

/* What the kernel knows of a socket. */
static void say_socket(const char *whose, int fd)
{
    struct tcp_info info = {0};
    int buffers[2] = {0}, unread = 0, unsent = 0;
    char line[300];
    RAW6(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &info, &(socklen_t){sizeof info}, 0);
    RAW6(SYS_getsockopt, fd, SOL_SOCKET, SO_RCVBUF, &buffers[0], &(socklen_t){sizeof(int)}, 0);
    RAW6(SYS_getsockopt, fd, SOL_SOCKET, SO_SNDBUF, &buffers[1], &(socklen_t){sizeof(int)}, 0);
    RAW3(SYS_ioctl, fd, FIONREAD, &unread);
    RAW3(SYS_ioctl, fd, TIOCOUTQ, &unsent);
    snprintf(line, sizeof line, "  %s: state %u, unread %d of %d, may grow to %u, segments of %u; unsent %d of %d, segments of %u, in flight %u, probes %u\n", whose,
             info.tcpi_state, unread, buffers[0], info.tcpi_rcv_ssthresh, info.tcpi_rcv_mss, unsent, buffers[1], info.tcpi_snd_mss, info.tcpi_unacked,
             info.tcpi_probes);
    say(line);
}

/* A call that has failed as it may not. */
#define CHECK_CALL(flow, holds) \
    do { \
        int was = errno; \
        if (!(holds)) \
            fprintf(stderr, "%s of fd %d, %zu of %zu, asks for %zu: %s, waited by %s\n", (flow)->writes ? "writer" : "reader", (flow)->connection->fd, (flow)->at, \
                    (flow)->total, (flow)->asked, (flow)->now, (flow)->waited ? (flow)->waited : "nothing"), \
                say_socket("here", (flow)->connection->fd), say_socket("peer", (flow)->connection->peer); \
        errno = was; \
        CHECK(holds); \
    } while (0)

static inline void blank(struct flow *flow, size_t length)
{
    memset(flow->buffer, BLANK, length);
    flow->piece_count = 1;
    flow->pieces[0] = (struct iovec){flow->buffer, length};
}

/* The buffer in pieces. */
static inline void cut(struct flow *flow, size_t length)
{
    size_t first = below(&flow->random, length + 1), second = below(&flow->random, length - first + 1);
    flow->pieces[0] = (struct iovec){flow->buffer, first};
    flow->pieces[1] = (struct iovec){flow->buffer + first, second};
    flow->pieces[2] = (struct iovec){flow->buffer + first + second, length - first - second};
    flow->piece_count = PIECES;
}

static inline void takes(struct flow *flow, const unsigned char *bytes, size_t length)
{
    const unsigned char *expected = pattern + flow->connection->base + flow->at;
    if (memcmp(bytes, expected, length) != 0)
        for (size_t at = 0; at < length; at++)
            if (bytes[at] != expected[at]) {
                fprintf(stderr, "fd %d: %s: byte %zu (%zu of %zu) is %02x, not %02x\n", flow->connection->fd, flow->now, flow->at + at, at, length, bytes[at],
                        expected[at]);
                break;
            }
    CHECK(flow->at + length <= flow->total && memcmp(bytes, expected, length) == 0);
    if (!flow->peeks)
        flow->at += length;
}

/* What a call that was left has received. */
static inline void recover_reading(struct flow *flow)
{
    for (int piece = 0; piece < flow->piece_count && !flow->peeks; piece++) {
        const unsigned char *bytes = flow->pieces[piece].iov_base;
        size_t length = 0;
        while (length < flow->pieces[piece].iov_len && bytes[length] != BLANK)
            length++;
        takes(flow, bytes, length);
    }
}

/* How much a call that was left has sent is unknown: the peer is sent the place where the stream goes on. */
static inline void recover_writing(struct flow *flow)
{
    flow->at += flow->asked;
    unsigned char skip[SKIP_LENGTH] = {SKIP, flow->at >> 21 & 0x7f, flow->at >> 14 & 0x7f, flow->at >> 7 & 0x7f, flow->at & 0x7f};
    for (size_t sent = 0; sent < sizeof skip;) {
        ssize_t done = WHOLE(flow, send(flow->connection->fd, skip + sent, sizeof skip - sent, MSG_NOSIGNAL));
        CHECK(done > 0 || is_passing(done));
        sent += done > 0 ? done : 0;
    }
}

/* Sleeps until there is something, or room, by a call that is drawn. Returns whether it says that there is. */
static int wait_for_it(struct flow *flow)
{
    int fd = flow->connection->fd, kind = below(&flow->random, 5);
    short events = flow->writes ? POLLOUT : POLLIN;
    struct pollfd entry = {fd, events, 0};
    struct epoll_event event = {.events = events, .data.fd = fd}, got;
    fd_set set;
    ssize_t done;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    fd_set *reads = flow->writes ? NULL : &set, *writes = flow->writes ? &set : NULL;
    switch (kind) {
    case 0:
    case 1: done = kind ? LEAVABLE(flow, ppoll(&entry, 1, NULL, NULL)) : LEAVABLE(flow, poll(&entry, 1, -1)); break;
    case 2: done = LEAVABLE(flow, select(fd + 1, reads, writes, NULL, NULL)); break;
    case 3: done = LEAVABLE(flow, pselect(fd + 1, reads, writes, NULL, NULL, NULL)); break;
    default:
        if (flow->in_set != fd) {
            if (epoll_ctl(flow->set, EPOLL_CTL_ADD, fd, &event) != 0) {
                /* A descriptor that leads nowhere is there now. */
                CHECK(errno == EBADF || errno == EPERM);
                return 0;
            }
            flow->in_set = fd;
        }
        done = LEAVABLE(flow, epoll_wait(flow->set, &got, 1, -1));
        flow->waited = flow->now;
        return done == 1 && flow->connection->fd == fd;
    }
    flow->waited = flow->now;
    CHECK_CALL(flow, done > 0 || is_passing(done));
    /* A number that another thread has closed counts as ready. */
    return done > 0 && flow->connection->fd == fd;
}

static ssize_t receive_messages(struct flow *flow, int fd, size_t length)
{
    struct mmsghdr messages[2] = {0};
    size_t first = length / 2;
    flow->pieces[0] = (struct iovec){flow->buffer, first};
    flow->pieces[1] = (struct iovec){flow->buffer + first, length - first};
    flow->piece_count = 2;
    for (int at = 0; at < 2; at++)
        messages[at].msg_hdr = (struct msghdr){.msg_iov = &flow->pieces[at], .msg_iovlen = 1};
    ssize_t done = LEAVABLE(flow, recvmmsg(fd, messages, 2, MSG_WAITFORONE, NULL));
    if (done < 0)
        return done;
    takes(flow, flow->buffer, messages[0].msg_len);
    if (done == 2)
        takes(flow, flow->buffer + first, messages[1].msg_len);
    return messages[0].msg_len;
}

static ssize_t receive_spliced(struct flow *flow, int fd, size_t length)
{
    ssize_t done = WHOLE(flow, splice(fd, NULL, flow->pipe[1], NULL, length, SPLICE_F_MOVE));
    for (ssize_t have = 0; have < done;) {
        ssize_t got = read(flow->pipe[0], flow->buffer + have, done - have);
        CHECK(got > 0 || is_passing(got));
        have += got > 0 ? got : 0;
    }
    return done;
}

/* One call that receives. */
static void receive_some(struct flow *flow)
{
    struct random *random = &flow->random;
    size_t length = draw_length(random, ROOM);
    flow->waited = NULL;
    flow->was_on_nic |= is_on_nic(flow->connection->fd);
    int knows = one_in(random, 2) && wait_for_it(flow), kind = below(random, 10), is_taken = 0, fd = flow->connection->fd;
    flow->waited = knows ? flow->waited : NULL;
    int flags = knows ? MSG_DONTWAIT : (int[]){0, 0, MSG_DONTWAIT, MSG_WAITALL}[below(random, 4)];
    /* Linux waits for ever if what is unread closes its window: it does so while a large segment is read in part. */
    int peeking = MSG_PEEK | (flags & ~MSG_WAITALL);
    struct msghdr message = {.msg_iov = flow->pieces, .msg_iovlen = PIECES};
    ssize_t done;
    /* recvmmsg gets a message of each half. */
    length += kind == 5 && length == 1;
    blank(flow, length);
    flow->asked = length;
    switch (kind) {
    case 0: done = LEAVABLE(flow, recv(fd, flow->buffer, length, flags)); break;
    case 1: done = LEAVABLE(flow, recvfrom(fd, flow->buffer, length, flags, NULL, NULL)); break;
    case 2: cut(flow, length), done = LEAVABLE(flow, readv(fd, flow->pieces, PIECES)); break;
    case 3: cut(flow, length), done = LEAVABLE(flow, recvmsg(fd, &message, flags)); break;
    case 4: flow->peeks = 1, done = LEAVABLE(flow, recv(fd, flow->buffer, length, peeking)); break;
    case 5: done = receive_messages(flow, fd, length), is_taken = 1; break;
    case 6: done = receive_spliced(flow, fd, length); break;
    default: done = LEAVABLE(flow, read(fd, flow->buffer, length)); break;
    }
    flow->asked = 0;
    if (done > 0 && !is_taken)
        takes(flow, flow->buffer, done);
    /* It sleeps no longer than it has to: what was said to be there is there. */
    CHECK_CALL(flow, !(knows && done < 0 && errno == EAGAIN));
    CHECK_CALL(flow, done >= 0 || is_passing(done));
    if (done == 0 && !flow->peeks) {
        CHECK_CALL(flow, flow->at == flow->total);
        flow->is_done = 1;
    }
    flow->peeks = 0;
}

static ssize_t send_spliced(struct flow *flow, const void *from, size_t length)
{
    length = length > 4096 ? 4096 : length;
    CHECK(write(flow->pipe[1], from, length) == (ssize_t)length);
    for (size_t sent = 0; sent < length;) {
        ssize_t done = WHOLE(flow, splice(flow->pipe[0], NULL, flow->connection->fd, NULL, length - sent, 0));
        CHECK(done > 0 || is_passing(done));
        sent += done > 0 ? done : 0;
    }
    return length;
}

static ssize_t send_messages(struct flow *flow, int fd, unsigned char *from, size_t length, int flags)
{
    struct iovec halves[2] = {{from, length - length / 2}, {from + length - length / 2, length / 2}};
    struct mmsghdr messages[2] = {0};
    for (int at = 0; at < 2; at++)
        messages[at].msg_hdr = (struct msghdr){.msg_iov = &halves[at], .msg_iovlen = 1};
    ssize_t done = LEAVABLE(flow, sendmmsg(fd, messages, 2, flags));
    return done < 0 ? done : done < 2 ? messages[0].msg_len : messages[0].msg_len + messages[1].msg_len;
}

/* One call that sends. */
static void send_some(struct flow *flow)
{
    struct random *random = &flow->random;
    unsigned char *from = pattern + flow->connection->base_of_program + flow->at;
    size_t length = draw_length(random, flow->total - flow->at);
    if (one_in(random, 4))
        wait_for_it(flow);
    int fd = flow->connection->fd, kind = below(random, 9);
    int flags = MSG_NOSIGNAL | (int[]){0, 0, 0, 0, 0, MSG_DONTWAIT, MSG_DONTWAIT, MSG_MORE}[below(random, 8)];
    struct iovec pieces[2] = {{from, length / 3}, {from + length / 3, length - length / 3}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    off_t offset = from - pattern;
    ssize_t done;
    flow->asked = length;
    switch (kind) {
    case 0: done = LEAVABLE(flow, send(fd, from, length, flags)); break;
    case 1: done = LEAVABLE(flow, sendto(fd, from, length, flags, NULL, 0)); break;
    case 2: done = LEAVABLE(flow, writev(fd, pieces, 2)); break;
    case 3: done = LEAVABLE(flow, sendmsg(fd, &message, flags)); break;
    case 4: done = send_messages(flow, fd, from, length, flags); break;
    case 5: done = LEAVABLE(flow, sendfile(fd, pattern_file, &offset, length)); break;
    case 6: done = send_spliced(flow, from, length); break;
    default: done = LEAVABLE(flow, write(fd, from, length)); break;
    }
    flow->asked = 0;
    CHECK_CALL(flow, done > 0 || is_passing(done));
    flow->at += done > 0 ? done : 0;
}

/* The same by the C library's streams, on a descriptor of their own. */
static void stream_all(struct flow *flow)
{
    int copy = dup(flow->connection->fd);
    flow->has_copy = 1;
    FILE *stream = fdopen(copy, flow->writes ? "w" : "r");
    CHECK(stream != NULL);
    flow->now = "a stream";
    while (flow->writes && flow->at < flow->total) {
        size_t length = draw_length(&flow->random, flow->total - flow->at);
        CHECK(fwrite(pattern + flow->connection->base_of_program + flow->at, 1, length, stream) == length);
        flow->at += length;
        CHECK(!one_in(&flow->random, 4) || fflush(stream) == 0);
    }
    while (!flow->writes && !flow->is_done) {
        size_t length = draw_length(&flow->random, ROOM), got = fread(flow->buffer, 1, length, stream);
        CHECK(got == length || feof(stream));
        takes(flow, flow->buffer, got);
        flow->is_done = got < length;
    }
    CHECK(fclose(stream) == 0 && flow->at == flow->total);
}

static void *play_flow(void *of)
{
    struct flow *flow = mine = of;
    pthread_setname_np(pthread_self(), flow->writes ? "writer" : "reader");
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (flow->is_real_time)
        CHECK(pthread_setschedparam(pthread_self(), SCHED_FIFO, &(struct sched_param){.sched_priority = 1}) == 0);
    if (flow->is_stream)
        stream_all(flow);
    sigsetjmp(flow->back, 1);
    /* After a jump, or in place of a thread that was cancelled in a call. */
    flow->may_leave = 0;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    /* The C library makes it asynchronous for the time of a call. */
    pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &state);
    flow->is_leaving = 0;
    if (flow->asked > 0) {
        flow->writes ? recover_writing(flow) : recover_reading(flow);
        flow->asked = 0;
    }
    flow->peeks = 0;
    while (!flow->is_done && (!flow->writes || flow->at < flow->total))
        flow->writes ? send_some(flow) : receive_some(flow);
    while (flow->writes && !flow->is_done) {
        int done = WHOLE(flow, shutdown(flow->connection->fd, SHUT_WR));
        CHECK(done == 0 || errno == EBADF || errno == ENOTSOCK);
        flow->is_done = done == 0;
    }
    flow->now = "done";
    return NULL;
}

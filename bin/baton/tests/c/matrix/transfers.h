/* Calls that receive and send. */

#include "play.h"

/* Functions that the compiler puts in the place of others. */
ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __recv_chk(int, void *, size_t, size_t, int);
ssize_t __recvfrom_chk(int, void *, size_t, size_t, int, struct sockaddr *, socklen_t *);

static const struct named receive_flags[] = {
    {"PEEK", MSG_PEEK},       {"WAITALL", MSG_WAITALL},         {"TRUNC", MSG_TRUNC},
    {"DONTWAIT", MSG_DONTWAIT}, {"OOB", MSG_OOB},               {"ERRQUEUE", MSG_ERRQUEUE},
    {"NOSIGNAL", MSG_NOSIGNAL}, {"CLOEXEC", MSG_CMSG_CLOEXEC},  {"WAITFORONE", MSG_WAITFORONE},
    {"unknown", 0x100000},
};
static const struct named send_flags[] = {
    {"DONTWAIT", MSG_DONTWAIT}, {"NOSIGNAL", MSG_NOSIGNAL}, {"MORE", MSG_MORE},         {"EOR", MSG_EOR},
    {"OOB", MSG_OOB},           {"CONFIRM", MSG_CONFIRM},   {"DONTROUTE", MSG_DONTROUTE}, {"ZEROCOPY", MSG_ZEROCOPY},
    {"FASTOPEN", MSG_FASTOPEN}, {"unknown", 0x100000},
};
static const struct named splice_flags[] = {{"NONBLOCK", SPLICE_F_NONBLOCK}, {"MORE", SPLICE_F_MORE}, {"MOVE", SPLICE_F_MOVE}, {"unknown", 0x100}};
static const struct named vector_flags[] = {{"HIPRI", RWF_HIPRI}, {"NOWAIT", RWF_NOWAIT}, {"DSYNC", RWF_DSYNC}, {"APPEND", RWF_APPEND}, {"unknown", 0x40000000}};

#define BUFFERS "usual", "length 0", "length -1", "length SSIZE_MAX", "length INT_MAX", "at null", "at kernel", "at hole", "at edge"
#define VECTORS "usual", "count 0", "count -1", "count 1024", "count 1025", "count INT_MAX", "no pieces", "empty pieces", "piece -1", "pieces SSIZE_MAX", \
    "at null", "at hole", "second null", "second hole", "second edge", "vectors null", "vectors hole", "vectors kernel"
#define MESSAGES VECTORS, "message null", "message hole", "message kernel", "name", "name of -1", "name of 4000", "name null", "name hole"
static const char *const receive_shapes[] = {BUFFERS, "at fixed"};
static const char *const receivefrom_shapes[] = {BUFFERS, "at fixed", "address", "address null", "address hole", "size null", "size hole", "size -1", "size 0", "size 4000"};
static const char *const send_shapes[] = {BUFFERS, "much"};
static const char *const sendto_shapes[] = {BUFFERS, "much", "address", "address hole", "address kernel", "address of 0", "address of -1", "address of 4000"};
static const char *const vector_shapes[] = {VECTORS};
static const char *const receive_message_shapes[] = {MESSAGES, "second fixed", "control", "control of -1", "control hole", "message fixed"};
static const char *const send_message_shapes[] = {MESSAGES, "much", "control of 1", "control of -1", "control hole"};
static const char *const several_shapes[] = {MESSAGES, "messages 0", "messages 1025", "second message hole", "limit of 0", "limit of -1", "limit late", "limit hole"};
static const char *const send_several_shapes[] = {MESSAGES, "much", "messages 0", "messages -1", "messages 1025", "second message hole"};
static const char *const file_shapes[] = {"usual", "length 0", "length -1", "length SSIZE_MAX", "offset", "offset 5", "offset -1", "offset hole", "offset kernel", "no file", "a set", "a pipe", "much"};
static const char *const splice_shapes[] = {"usual", "length 0", "length -1", "offset 0", "offset hole", "no pipe"};

/* Length of a call for one buffer. */
static size_t length_of(const struct play *play)
{
    if (is_shape(play, "length 0"))
        return 0;
    if (is_shape(play, "length -1"))
        return -1;
    if (is_shape(play, "length SSIZE_MAX"))
        return SSIZE_MAX;
    if (is_shape(play, "length INT_MAX"))
        return INT_MAX;
    return is_shape(play, "much") ? MUCH : WANTED;
}

static void *buffer_of(struct play *play)
{
    return is_about(play, "at ") ? address_of(shape_of(play), play->buffer) : is_shape(play, "much") ? play->much : play->buffer;
}

/* Two pieces of a call for several, or as its shape says. Sets their count. */
static struct iovec *pieces_of(struct play *play, long *count)
{
    struct iovec *all = play->pieces;
    size_t first = is_shape(play, "much") ? MUCH / 2 : 3, second = is_shape(play, "much") ? MUCH / 2 : WANTED - 3;
    char *start = is_shape(play, "much") ? play->much : play->buffer;
    *count = 2;
    all[0] = (struct iovec){is_about(play, "at ") ? address_of(shape_of(play), start) : start, first};
    all[1] = (struct iovec){is_about(play, "second ") && !is_shape(play, "second message hole") ? address_of(shape_of(play), start) : start + first, second};
    if (is_shape(play, "empty pieces"))
        all[0].iov_len = all[1].iov_len = 0;
    if (is_shape(play, "piece -1"))
        all[1].iov_len = -1;
    if (is_shape(play, "pieces SSIZE_MAX"))
        all[0].iov_len = all[1].iov_len = SSIZE_MAX;
    if (is_shape(play, "no pieces"))
        *count = 0;
    if (is_about(play, "count ")) {
        const char *number = shape_of(play) + strlen("count ");
        *count = strcmp(number, "INT_MAX") == 0 ? INT_MAX : atoi(number);
        for (int at = 0; at < MANY; at++)
            all[at] = (struct iovec){play->buffer + at, 1};
    }
    return is_about(play, "vectors ") ? (struct iovec *)address_of(shape_of(play), all) : all;
}

static struct msghdr *message_of(struct play *play)
{
    struct msghdr *message = &play->message;
    long count;
    message->msg_iov = pieces_of(play, &count);
    message->msg_iovlen = count;
    if (is_about(play, "name")) {
        message->msg_name = address_of(shape_of(play), play->name);
        message->msg_namelen = is_shape(play, "name of -1") ? -1 : is_shape(play, "name of 4000") ? 4000 : 16;
    }
    if (is_about(play, "control")) {
        message->msg_control = address_of(shape_of(play), play->control);
        message->msg_controllen = is_shape(play, "control of -1") ? -1 : is_shape(play, "control of 1") ? 1 : 64;
    }
    return is_about(play, "message ") ? (struct msghdr *)address_of(shape_of(play), message) : message;
}

static void say_message(struct play *play, const struct msghdr *message)
{
    say(play, " message=%d/%zu/%x", (int)message->msg_namelen, message->msg_controllen, message->msg_flags);
}

/* Two messages, the first one as the shape says. Sets their count. */
static struct mmsghdr *messages_of(struct play *play, unsigned *count)
{
    struct mmsghdr *all = play->messages;
    struct iovec *last = &play->pieces[MANY - 1];
    const char *number = is_about(play, "messages ") ? shape_of(play) + strlen("messages ") : "2";
    struct msghdr *first = message_of(play);
    *count = atoi(number);
    all[0].msg_hdr = play->message;
    *last = (struct iovec){is_shape(play, "second message hole") ? hole : play->buffer + 32, WANTED};
    for (int at = 1; at < MANY; at++)
        all[at].msg_hdr = (struct msghdr){.msg_iov = last, .msg_iovlen = 1};
    return first == &play->message ? all : (struct mmsghdr *)first;
}

static void say_messages(struct play *play)
{
    say(play, " lengths=%ld/%ld", amount(play, play->messages[0].msg_len), amount(play, play->messages[1].msg_len));
    say_message(play, &play->messages[0].msg_hdr);
}

static long make_read(struct play *play) { return read(play->fd, buffer_of(play), length_of(play)); }
static long make_read_chk(struct play *play) { return __read_chk(play->fd, buffer_of(play), length_of(play), -1); }
static long make_recv(struct play *play) { return recv(play->fd, buffer_of(play), length_of(play), play->flags); }
static long make_recv_chk(struct play *play) { return __recv_chk(play->fd, buffer_of(play), length_of(play), -1, play->flags); }
static long make_write(struct play *play) { return write(play->fd, buffer_of(play), length_of(play)); }
static long make_send(struct play *play) { return send(play->fd, buffer_of(play), length_of(play), play->flags); }

/* Size of an address; where it is. */
static socklen_t *size_of(struct play *play, socklen_t *size)
{
    *size = is_shape(play, "size -1") ? -1 : is_shape(play, "size 0") ? 0 : is_shape(play, "size 4000") ? 4000 : 16;
    return is_about(play, "size ") ? (socklen_t *)address_of(shape_of(play), size) : size;
}

static long receive_from(struct play *play, int checked)
{
    socklen_t size;
    int with_name = is_about(play, "address") || is_about(play, "size ");
    struct sockaddr *name = with_name ? (struct sockaddr *)address_of(shape_of(play), play->name) : NULL;
    if (is_about(play, "size "))
        name = (struct sockaddr *)play->name;
    socklen_t *at = size_of(play, &size);
    long done = checked ? __recvfrom_chk(play->fd, buffer_of(play), length_of(play), -1, play->flags, name, with_name ? at : NULL)
                        : recvfrom(play->fd, buffer_of(play), length_of(play), play->flags, name, with_name ? at : NULL);
    say(play, " size=%d", (int)size);
    return done;
}

static long make_recvfrom(struct play *play) { return receive_from(play, 0); }
static long make_recvfrom_chk(struct play *play) { return receive_from(play, 1); }

static long make_sendto(struct play *play)
{
    socklen_t size = is_shape(play, "address of 0") ? 0 : is_shape(play, "address of -1") ? -1 : is_shape(play, "address of 4000") ? 4000 : 16;
    struct sockaddr *name = is_about(play, "address") ? (struct sockaddr *)address_of(shape_of(play), play->name) : NULL;
    return sendto(play->fd, buffer_of(play), length_of(play), play->flags, name, name ? size : 0);
}

static long make_readv(struct play *play)
{
    long count;
    struct iovec *pieces = pieces_of(play, &count);
    return readv(play->fd, pieces, count);
}

static long make_writev(struct play *play)
{
    long count;
    struct iovec *pieces = pieces_of(play, &count);
    return writev(play->fd, pieces, count);
}

static long make_preadv2(struct play *play)
{
    long count;
    struct iovec *pieces = pieces_of(play, &count);
    return preadv2(play->fd, pieces, count, -1, play->flags);
}

static long make_pwritev2(struct play *play)
{
    long count;
    struct iovec *pieces = pieces_of(play, &count);
    return pwritev2(play->fd, pieces, count, -1, play->flags);
}

static long make_recvmsg(struct play *play)
{
    long done = recvmsg(play->fd, message_of(play), play->flags);
    say_message(play, &play->message);
    return done;
}

static long make_sendmsg(struct play *play) { return sendmsg(play->fd, message_of(play), play->flags); }

static long make_recvmmsg(struct play *play)
{
    struct timespec limit = {is_shape(play, "limit of -1") ? -1 : 0, is_shape(play, "limit late") ? 1000000000 : 0};
    unsigned count;
    struct mmsghdr *all = messages_of(play, &count);
    struct timespec *at = is_about(play, "limit ") ? (struct timespec *)address_of(shape_of(play), &limit) : NULL;
    long done = recvmmsg(play->fd, all, count, play->flags, at);
    say_messages(play);
    return done;
}

static long make_sendmmsg(struct play *play)
{
    unsigned count;
    struct mmsghdr *all = messages_of(play, &count);
    long done = sendmmsg(play->fd, all, count, play->flags);
    say_messages(play);
    return done;
}

static long make_sendfile(struct play *play)
{
    off_t offset = is_shape(play, "offset 5") ? 10 : is_shape(play, "offset -1") ? -1 : 0;
    off_t *at = is_about(play, "offset") ? (off_t *)address_of(shape_of(play), &offset) : NULL;
    int from = is_shape(play, "no file") ? -1 : is_shape(play, "a set") ? play->set : is_shape(play, "a pipe") ? play->other[0] : file;
    long done = sendfile(play->fd, from, at, length_of(play));
    say(play, " offset=%ld", amount(play, offset));
    return done;
}

static long to_or_from_pipe(struct play *play, int receives)
{
    loff_t offset = 0;
    loff_t *at = is_about(play, "offset ") ? (loff_t *)address_of(shape_of(play), &offset) : NULL;
    if (is_shape(play, "no pipe"))
        return receives ? splice(play->fd, NULL, file, at, WANTED, play->flags) : splice(file, at, play->fd, NULL, WANTED, play->flags);
    if (!receives)
        return splice(play->other[0], at, play->fd, NULL, length_of(play), play->flags);
    long done = splice(play->fd, NULL, play->other[1], at, length_of(play), play->flags);
    if (done > 0)
        CHECK(raw(SYS_read, play->other[0], (long)play->buffer, ROOM, 0, 0, 0) >= done);
    return done;
}

static long make_splice_in(struct play *play) { return to_or_from_pipe(play, 1); }
static long make_splice_out(struct play *play) { return to_or_from_pipe(play, 0); }

static long make_dprintf(struct play *play) { return dprintf(play->fd, "%s%d", "01234567", 89); }

/* A stream of the C library without a buffer. It is not closed, since that would close the connection. */
static long make_fdopen(struct play *play)
{
    FILE *stream = fdopen(play->fd, "w");
    CHECK(stream != NULL && setvbuf(stream, NULL, _IONBF, 0) == 0);
    return fputs(digits, stream) < 0 ? -1 : WANTED;
}

/* Something to send through a pipe. */
static void fill_pipe(struct play *play)
{
    CHECK(write(play->other[1], play->buffer, WANTED) == WANTED);
}

static const char *const only_usual[] = {"usual"};

static const struct situation receiving[] = {
    {"nothing, data comes", NOTHING, OPEN, SENDS},
    {"nothing, FIN comes", NOTHING, OPEN, ENDS},
    {"nothing, RST comes", NOTHING, OPEN, RESETS},
    {"a part, more comes", PART, OPEN, SENDS},
    {"a part, FIN comes", PART, OPEN, ENDS},
    {"a part, RST comes", PART, OPEN, RESETS},
    {"enough", WHOLE, OPEN, SENDS},
    {"FIN", NOTHING, PEERS_FIN, RESETS},
    {"a part and FIN", PART, PEERS_FIN, RESETS},
    {"enough and FIN", WHOLE, PEERS_FIN, RESETS},
    {"RST", NOTHING, PEERS_RESET, NO_ACT},
    {"a part and RST", PART, PEERS_RESET, NO_ACT},
    {"urgent", URGENT, OPEN, SENDS},
    {"own FIN, data comes", NOTHING, OWN_FIN, SENDS},
    {"both FINs", NOTHING, PEERS_FIN | OWN_FIN, NO_ACT},
    {"full, data comes", NOTHING, FULL, SENDS},
};
static const struct situation sending[] = {
    {"nothing", NOTHING, OPEN, READS},
    {"unread data", PART, OPEN, READS},
    {"full, peer reads", NOTHING, FULL, READS},
    {"full, RST comes", NOTHING, FULL, RESETS},
    {"full and FIN, peer reads", NOTHING, FULL | PEERS_FIN, READS},
    {"FIN", NOTHING, PEERS_FIN, READS},
    {"a part and FIN", PART, PEERS_FIN, READS},
    {"RST", NOTHING, PEERS_RESET, NO_ACT},
    {"a part and RST", PART, PEERS_RESET, NO_ACT},
    {"own FIN", NOTHING, OWN_FIN, READS},
    {"both FINs", NOTHING, PEERS_FIN | OWN_FIN, NO_ACT},
};

#define FLAGGED_RECEIVES(name, make, flags, shapes) \
    {name, make, flags, COUNT(flags), 1, shapes, COUNT(shapes), 0, 1 << BLOCKING | 1 << NONBLOCKING | 1 << LONG | 1 << SHORT | 1 << LOW_WATER, receiving, COUNT(receiving), NULL}
#define FLAGGED_SENDS(name, make, flags, shapes, arm) \
    {name, make, flags, COUNT(flags), 1, shapes, COUNT(shapes), 1, 1 << BLOCKING | 1 << NONBLOCKING | 1 << LONG | 1 << SHORT, sending, COUNT(sending), arm}

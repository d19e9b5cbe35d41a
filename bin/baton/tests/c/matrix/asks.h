/* Calls that do not wait: options, commands, names, descriptors, ends. Each is made once; what it has set is read back. */

#include "play.h"

#define LEVEL(level, name) {#name, (long)(level) << 32 | (name)}
/* Values that the kernel's buffers decide, or the machine, are left out, as is what TCP_INFO measures. */
static const struct named read_options[] = {
    LEVEL(SOL_SOCKET, SO_ERROR), LEVEL(SOL_SOCKET, SO_TYPE), LEVEL(SOL_SOCKET, SO_ACCEPTCONN), LEVEL(SOL_SOCKET, SO_KEEPALIVE), LEVEL(SOL_SOCKET, SO_LINGER),
    LEVEL(SOL_SOCKET, SO_RCVLOWAT), LEVEL(SOL_SOCKET, SO_SNDLOWAT), LEVEL(SOL_SOCKET, SO_REUSEADDR), LEVEL(SOL_SOCKET, SO_OOBINLINE), LEVEL(SOL_SOCKET, SO_RCVTIMEO),
    LEVEL(SOL_SOCKET, SO_SNDTIMEO), LEVEL(SOL_SOCKET, SO_PRIORITY), LEVEL(SOL_SOCKET, SO_MARK), LEVEL(SOL_SOCKET, SO_DOMAIN), LEVEL(SOL_SOCKET, SO_PROTOCOL),
    LEVEL(SOL_SOCKET, SO_PEEK_OFF), LEVEL(SOL_SOCKET, SO_BUSY_POLL), LEVEL(SOL_SOCKET, SO_TIMESTAMP), LEVEL(SOL_SOCKET, SO_ZEROCOPY), LEVEL(IPPROTO_TCP, TCP_NODELAY),
    LEVEL(IPPROTO_TCP, TCP_CORK), LEVEL(IPPROTO_TCP, TCP_KEEPIDLE), LEVEL(IPPROTO_TCP, TCP_KEEPINTVL), LEVEL(IPPROTO_TCP, TCP_KEEPCNT), LEVEL(IPPROTO_TCP, TCP_SYNCNT),
    LEVEL(IPPROTO_TCP, TCP_LINGER2), LEVEL(IPPROTO_TCP, TCP_DEFER_ACCEPT), LEVEL(IPPROTO_TCP, TCP_USER_TIMEOUT), LEVEL(IPPROTO_TCP, TCP_NOTSENT_LOWAT),
    LEVEL(IPPROTO_TCP, TCP_CONGESTION), LEVEL(IPPROTO_TCP, TCP_REPAIR), LEVEL(IPPROTO_TCP, TCP_FASTOPEN), LEVEL(IPPROTO_TCP, TCP_INQ), LEVEL(IPPROTO_TCP, TCP_ULP),
    LEVEL(IPPROTO_TCP, TCP_INFO), LEVEL(IPPROTO_IP, IP_TOS), LEVEL(IPPROTO_IP, IP_TTL), LEVEL(IPPROTO_IP, IP_OPTIONS), LEVEL(IPPROTO_IP, IP_MTU_DISCOVER),
    LEVEL(IPPROTO_IP, IP_RECVTTL), {"unknown", (long)IPPROTO_TCP << 32 | 999}, {"unknown level", 999L << 32 | 1},
};
static const struct named set_options[] = {
    LEVEL(SOL_SOCKET, SO_ERROR), LEVEL(SOL_SOCKET, SO_TYPE), LEVEL(SOL_SOCKET, SO_KEEPALIVE), LEVEL(SOL_SOCKET, SO_RCVLOWAT), LEVEL(SOL_SOCKET, SO_SNDLOWAT),
    LEVEL(SOL_SOCKET, SO_REUSEADDR), LEVEL(SOL_SOCKET, SO_OOBINLINE), LEVEL(SOL_SOCKET, SO_PRIORITY), LEVEL(SOL_SOCKET, SO_MARK), LEVEL(SOL_SOCKET, SO_PEEK_OFF),
    LEVEL(SOL_SOCKET, SO_TIMESTAMP), LEVEL(SOL_SOCKET, SO_ZEROCOPY), LEVEL(SOL_SOCKET, SO_DONTROUTE), LEVEL(IPPROTO_TCP, TCP_NODELAY), LEVEL(IPPROTO_TCP, TCP_CORK),
    LEVEL(IPPROTO_TCP, TCP_QUICKACK), LEVEL(IPPROTO_TCP, TCP_KEEPIDLE), LEVEL(IPPROTO_TCP, TCP_KEEPINTVL), LEVEL(IPPROTO_TCP, TCP_KEEPCNT), LEVEL(IPPROTO_TCP, TCP_SYNCNT),
    LEVEL(IPPROTO_TCP, TCP_LINGER2), LEVEL(IPPROTO_TCP, TCP_DEFER_ACCEPT), LEVEL(IPPROTO_TCP, TCP_USER_TIMEOUT), LEVEL(IPPROTO_TCP, TCP_NOTSENT_LOWAT),
    LEVEL(IPPROTO_TCP, TCP_CONGESTION), LEVEL(IPPROTO_TCP, TCP_FASTOPEN), LEVEL(IPPROTO_TCP, TCP_INQ), LEVEL(IPPROTO_TCP, TCP_ULP), LEVEL(IPPROTO_TCP, TCP_INFO),
    LEVEL(IPPROTO_IP, IP_TOS), LEVEL(IPPROTO_IP, IP_TTL), LEVEL(IPPROTO_IP, IP_OPTIONS), LEVEL(IPPROTO_IP, IP_MTU_DISCOVER), LEVEL(IPPROTO_IP, IP_RECVTTL),
    {"unknown", (long)IPPROTO_TCP << 32 | 999}, {"unknown level", 999L << 32 | 1},
};
static const struct named requests[] = {
    {"FIONREAD", FIONREAD}, {"SIOCOUTQ", TIOCOUTQ}, {"SIOCOUTQNSD", 0x894b}, {"SIOCATMARK", 0x8905}, {"FIONBIO", FIONBIO}, {"FIOASYNC", FIOASYNC},
    {"FIOCLEX", FIOCLEX},   {"FIOGETOWN", 0x8903},  {"FIOSETOWN", 0x8901},   {"unknown", 0x12345},
};
static const struct named commands[] = {
    {"GETFL", F_GETFL}, {"SETFL", F_SETFL}, {"GETFD", F_GETFD}, {"SETFD", F_SETFD}, {"DUPFD", F_DUPFD}, {"DUPFD_CLOEXEC", F_DUPFD_CLOEXEC}, {"GETOWN", F_GETOWN},
    {"SETOWN", F_SETOWN}, {"GETSIG", F_GETSIG}, {"SETSIG", F_SETSIG}, {"GETLK", F_GETLK}, {"unknown", 9999},
};
static const struct named ways_to_shut[] = {{"RD", SHUT_RD}, {"WR", SHUT_WR}, {"RDWR", SHUT_RDWR}, {"3", 3}, {"-1", -1}};
static const struct named families[] = {{"INET", AF_INET}, {"UNSPEC", AF_UNSPEC}, {"UNIX", AF_UNIX}, {"999", 999}};
static const struct named operations[] = {{"ADD", EPOLL_CTL_ADD}, {"MOD", EPOLL_CTL_MOD}, {"DEL", EPOLL_CTL_DEL}, {"0", 0}, {"9", 9}};
static const struct named nothing_else[] = {{"it", 0}};

static const char *const read_shapes[] = {"usual", "size 0", "size 1", "size 100", "size -1", "size null", "size hole", "at null", "at hole", "at kernel"};
static const char *const set_shapes[] = {"value 1", "value 0", "value 7", "value -1", "value 100000", "size 0", "size 1", "size 3", "size 100", "size -1", "at null", "at hole", "at kernel"};
static const char *const request_shapes[] = {"value 0", "value 1", "value -1", "at null", "at hole", "at kernel", "at fixed"};
static const char *const command_shapes[] = {"value 0", "value 1", "value -1", "value 2048", "value 50", "value 100000"};
static const char *const name_shapes[] = {"usual", "size 0", "size 1", "size -1", "size null", "size hole", "at null", "at hole", "at kernel"};
static const char *const connect_shapes[] = {"usual", "size 0", "size 1", "size -1", "size 4000", "at null", "at hole", "at kernel"};
static const char *const accept_shapes[] = {"usual", "of a listener", "of a listener, size -1", "of a listener, size 0", "of a listener, size hole", "of a listener, at hole", "at hole"};
static const char *const copy_shapes[] = {"free", "itself", "closed", "negative", "beyond the limit"};
static const char *const control_shapes[] = {"usual", "again", "at null", "at hole", "at kernel", "itself", "no set", "closed"};

static int number_in(const struct play *play, int otherwise)
{
    const char *shape = shape_of(play), *last = strrchr(shape, ' ');
    return last && (is_about(play, "size ") || is_about(play, "value ") || strstr(shape, "size ")) && (last[1] == '-' || (last[1] >= '0' && last[1] <= '9')) ? atoi(last + 1) : otherwise;
}

static long make_getsockopt(struct play *play)
{
    socklen_t size = number_in(play, 64);
    int level = play->call->flags[play->flags].value >> 32, option = (int)play->call->flags[play->flags].value;
    char *at = is_about(play, "at ") ? address_of(shape_of(play), play->name) : play->name;
    socklen_t *size_at = is_about(play, "size ") ? (socklen_t *)address_of(shape_of(play), &size) : &size;
    long done = getsockopt(play->fd, level, option, at, size_at);
    /* Of TCP_INFO the state and the options are no measurements, and not the acknowledgement of a FIN, which comes in its own time. */
    int state = play->name[0], is_info = level == IPPROTO_TCP && option == TCP_INFO;
    if (is_info && (state == TCP_FIN_WAIT1 || state == TCP_FIN_WAIT2))
        play->name[0] = TCP_FIN_WAIT1;
    int compared = is_info ? (size > 0 ? 1 : 0) : size < 64 ? (int)size : 64;
    say(play, " size=%d value=%x", (int)size, done == 0 ? hash(0, play->name, compared < 0 ? 0 : compared) : 0);
    return done;
}

static long make_setsockopt(struct play *play)
{
    int level = play->call->flags[play->flags].value >> 32, option = (int)play->call->flags[play->flags].value;
    int value = is_about(play, "value ") ? number_in(play, 0) : 1, is_name = level == IPPROTO_TCP && (option == TCP_CONGESTION || option == TCP_ULP);
    socklen_t size = is_about(play, "size ") ? number_in(play, 4) : 4, read_size = sizeof play->name;
    memcpy(play->name, &value, sizeof value);
    if (is_name)
        strcpy(play->name, "reno");
    void *at = is_about(play, "at ") ? address_of(shape_of(play), play->name) : play->name;
    long done = setsockopt(play->fd, level, option, at, size);
    int number = errno;
    memset(play->name, 0, sizeof play->name);
    if (done == 0) {
        long read_back = getsockopt(play->fd, level, option, play->name, &read_size);
        say(play, " then=%ld/%d/%x", read_back, read_back == 0 ? (int)read_size : errno, hash(0, play->name, 16));
    }
    errno = number;
    return done;
}

static long make_ioctl(struct play *play)
{
    int value = number_in(play, 0), request = play->call->flags[play->flags].value;
    int *at = is_about(play, "at ") ? (int *)address_of(shape_of(play), &value) : &value;
    long done = ioctl(play->fd, request, at);
    int is_outgoing = request == TIOCOUTQ || request == 0x894b;
    /* How much of a full queue is sent, and when it is acknowledged, is the queue's size and the peer's affair. */
    say(play, " value=%d flags=%x/%x", is_outgoing ? value > 0 : value, fcntl(play->fd, F_GETFL), fcntl(play->fd, F_GETFD));
    return done;
}

static long make_fcntl(struct play *play)
{
    int command = play->call->flags[play->flags].value, number;
    long done = fcntl(play->fd, command, (long)number_in(play, 0));
    number = errno;
    if (done >= 0 && (command == F_DUPFD || command == F_DUPFD_CLOEXEC)) {
        play->extra = done;
        done = done >= number_in(play, 0);
        say(play, " copy=%x/%x", fcntl(play->extra, F_GETFL), fcntl(play->extra, F_GETFD));
    }
    say(play, " flags=%x/%x", fcntl(play->fd, F_GETFL), fcntl(play->fd, F_GETFD));
    errno = number;
    return done;
}

static long names(struct play *play, int is_peers)
{
    struct sockaddr_in *name = (struct sockaddr_in *)play->name;
    socklen_t size = number_in(play, 64);
    void *at = is_about(play, "at ") ? address_of(shape_of(play), play->name) : play->name;
    socklen_t *size_at = is_about(play, "size ") ? (socklen_t *)address_of(shape_of(play), &size) : &size;
    long done = is_peers ? getpeername(play->fd, at, size_at) : getsockname(play->fd, at, size_at);
    say(play, " size=%d family=%d address=%x", (int)size, name->sin_family, ntohl(name->sin_addr.s_addr));
    return done;
}

static long make_getsockname(struct play *play) { return names(play, 0); }
static long make_getpeername(struct play *play) { return names(play, 1); }
static long make_shutdown(struct play *play) { return shutdown(play->fd, play->call->flags[play->flags].value); }
static long make_listen(struct play *play) { return listen(play->fd, 1); }

static long make_connect(struct play *play)
{
    struct sockaddr_in *name = (struct sockaddr_in *)play->name;
    *name = listens;
    name->sin_family = play->call->flags[play->flags].value;
    void *at = is_about(play, "at ") ? address_of(shape_of(play), play->name) : play->name;
    return connect(play->fd, at, number_in(play, sizeof *name));
}

/* Of the connection, which is no listener, or of one that has a connection to give. */
static long accepts(struct play *play, int flags, int with_flags)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address, size = number_in(play, 16);
    int fd = play->fd, client = -1;
    if (is_about(play, "of a listener")) {
        CHECK((fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && bind(fd, (struct sockaddr *)&address, length) == 0 && listen(fd, 4) == 0);
        CHECK(getsockname(fd, (struct sockaddr *)&address, &length) == 0);
        CHECK((client = raw(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0, 0)) >= 0 && raw(SYS_connect, client, (long)&address, length, 0, 0, 0) == 0);
    }
    void *at = strstr(shape_of(play), "at hole") ? hole : play->name;
    socklen_t *size_at = strstr(shape_of(play), "size hole") ? (socklen_t *)hole : &size;
    long done = with_flags ? accept4(fd, at, size_at, flags) : accept(fd, at, size_at);
    int number = errno;
    if (done >= 0) {
        say(play, " flags=%x/%x", fcntl(done, F_GETFL), fcntl(done, F_GETFD));
        CHECK(close(done) == 0);
        done = 0;
    }
    say(play, " size=%d family=%d", (int)size, ((struct sockaddr *)play->name)->sa_family);
    if (client >= 0)
        CHECK(raw(SYS_close, client, 0, 0, 0, 0, 0) == 0 && close(fd) == 0);
    errno = number;
    return done;
}

static const struct named accept_flags[] = {{"0", 0}, {"NONBLOCK", SOCK_NONBLOCK}, {"CLOEXEC", SOCK_CLOEXEC}, {"unknown", 0x40}};

static long make_accept(struct play *play) { return accepts(play, 0, 0); }
static long make_accept4(struct play *play) { return accepts(play, play->call->flags[play->flags].value, 1); }

/* A descriptor to copy to. */
static int target_of(const struct play *play)
{
    return is_shape(play, "itself") ? play->fd : is_shape(play, "negative") ? -1 : is_shape(play, "beyond the limit") ? 1 << 28 : FREE;
}

static long copies(struct play *play, int with_flags)
{
    int to = target_of(play), from = is_shape(play, "closed") ? CLOSED : play->fd;
    long done = with_flags ? dup3(from, to, play->call->flags[play->flags].value) : dup2(from, to);
    int number = errno;
    if (done == FREE) {
        say(play, " copy=%x/%x", fcntl(FREE, F_GETFL), fcntl(FREE, F_GETFD));
        play->extra = FREE;
    }
    errno = number;
    return done == play->fd ? 1 : done;
}

static const struct named copy_flags[] = {{"0", 0}, {"CLOEXEC", O_CLOEXEC}, {"unknown", 1}};

static long make_dup2(struct play *play) { return copies(play, 0); }
static long make_dup3(struct play *play) { return copies(play, 1); }
static long make_dup(struct play *play) { return (play->extra = dup(play->fd)) >= 0 ? 0 : -1; }
static long make_close(struct play *play) { return close(play->fd); }
static long make_close_range(struct play *play) { return close_range(play->fd, play->fd, play->call->flags[play->flags].value); }
static long make_sockatmark(struct play *play) { return sockatmark(play->fd); }

static const struct named range_flags[] = {{"0", 0}, {"CLOEXEC", 4}, {"unknown", 0x40000000}};

static long make_epoll_ctl(struct play *play)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 3}, got = {0};
    int operation = play->call->flags[play->flags].value;
    int set = is_shape(play, "no set") ? play->fd : play->set, fd = is_shape(play, "itself") ? play->set : is_shape(play, "closed") ? CLOSED : play->fd;
    void *at = is_about(play, "at ") ? address_of(shape_of(play), &event) : (void *)&event;
    if (is_shape(play, "again"))
        CHECK(epoll_ctl(play->set, EPOLL_CTL_ADD, play->fd, &event) == 0);
    event.data.u64 = 4;
    long done = epoll_ctl(set, operation, fd, at);
    int number = errno;
    long ready = epoll_wait(play->set, &got, 1, 0);
    say(play, " then=%ld/%x/%lu", ready, ready > 0 ? got.events : 0, ready > 0 ? (unsigned long)got.data.u64 : 0);
    errno = number;
    return done;
}

static const struct situation asking[] = {
    {"nothing", NOTHING, OPEN, NO_ACT},
    {"a part", PART, OPEN, NO_ACT},
    {"urgent", URGENT, OPEN, NO_ACT},
    {"FIN", NOTHING, PEERS_FIN, NO_ACT},
    {"a part and FIN", PART, PEERS_FIN, NO_ACT},
    {"RST", NOTHING, PEERS_RESET, NO_ACT},
    {"a part and RST", PART, PEERS_RESET, NO_ACT},
    {"own FIN", NOTHING, OWN_FIN, NO_ACT},
    {"both FINs", NOTHING, PEERS_FIN | OWN_FIN, NO_ACT},
    {"full", NOTHING, FULL, NO_ACT},
};

#define ASKS(name, make, flags, shapes, modes) \
    {name, make, flags, COUNT(flags), 0, shapes, COUNT(shapes), 0, modes, asking, COUNT(asking), NULL}

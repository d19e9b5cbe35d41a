/* Sends with MSG_ZEROCOPY and their completions, as the kernel makes them over loopback, where it copies the bytes: their numbers, what
 * recvmsg says, and who is woken. Usage: zerocopy all|CASE [moved]
 *
 * Each case has a connection of its own. */

#include "sockets.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>
#include <linux/errqueue.h>

enum { ROUNDS = 48, KEPT = 8, MOST = 6000 };
enum { SEND, SENDTO, SENDMSG, SENDMMSG, PLAIN, NOTHING, WAYS };

static struct pair ends;
static int is_ipv6;
static unsigned long sent, received;
/* Sends that have a number, and those of which the completion was read. */
static unsigned made, completed;
static char memory[KEPT][MOST];
static char large[8 << 20];

static unsigned char of(unsigned long at)
{
    return at * 31 + (at >> 8);
}

static void enable(int fd, int on)
{
    int is = -1;
    socklen_t size = sizeof is;
    CHECK(setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0);
    CHECK(getsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &is, &size) == 0 && is == on);
}

/* Reads a completion, if there is one. Returns how many sends it is of. */
static unsigned take(int fd)
{
    char control[200], name[100];
    struct msghdr message = {.msg_name = name, .msg_namelen = sizeof name, .msg_control = control, .msg_controllen = sizeof control};
    struct sock_extended_err error;
    size_t length = sizeof error + (is_ipv6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
    ssize_t got = recvmsg(fd, &message, MSG_ERRQUEUE);
    if (got < 0) {
        CHECK(errno == EAGAIN && message.msg_controllen == sizeof control);
        return 0;
    }
    CHECK(got == 0 && message.msg_flags == MSG_ERRQUEUE && message.msg_namelen == 0 && message.msg_controllen == CMSG_SPACE(length));
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    CHECK(header != NULL && header->cmsg_len == CMSG_LEN(length));
    CHECK(header->cmsg_level == (is_ipv6 ? SOL_IPV6 : SOL_IP) && header->cmsg_type == (is_ipv6 ? IPV6_RECVERR : IP_RECVERR));
    memcpy(&error, CMSG_DATA(header), sizeof error);
    CHECK(error.ee_origin == SO_EE_ORIGIN_ZEROCOPY && error.ee_code == SO_EE_CODE_ZEROCOPY_COPIED);
    CHECK(error.ee_errno == 0 && error.ee_type == 0 && error.ee_pad == 0);
    CHECK(error.ee_info == completed && error.ee_data >= error.ee_info);
    completed = error.ee_data + 1;
    return error.ee_data - error.ee_info + 1;
}

static int is_pending(int fd, int limit)
{
    struct pollfd entry = {.fd = fd};
    int count = poll(&entry, 1, limit);
    CHECK(count == 0 || (count == 1 && entry.revents == POLLERR));
    return count;
}

/* Waits for the completion of every send that has a number; there are no others. */
static void until_completed(int fd)
{
    while (completed < made)
        CHECK(is_pending(fd, -1) && take(fd) > 0);
    CHECK(completed == made && !is_pending(fd, 0) && take(fd) == 0);
}

static void transmit(int way, char *bytes, size_t length)
{
    struct iovec pieces[2] = {{bytes, length / 2}, {bytes + length / 2, length - length / 2}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    struct mmsghdr several[2] = {{.msg_hdr = {.msg_iov = &pieces[0], .msg_iovlen = 1}}, {.msg_hdr = {.msg_iov = &pieces[1], .msg_iovlen = 1}}};
    ssize_t whole = length;
    for (size_t at = 0; at < length; at++)
        bytes[at] = of(sent + at);
    switch (way) {
    case SEND: CHECK(send(ends.server, bytes, length, MSG_ZEROCOPY) == whole); break;
    case SENDTO: CHECK(sendto(ends.server, bytes, length, MSG_ZEROCOPY, NULL, 0) == whole); break;
    case SENDMSG: CHECK(sendmsg(ends.server, &message, MSG_ZEROCOPY | MSG_NOSIGNAL) == whole); break;
    case SENDMMSG: CHECK(sendmmsg(ends.server, several, 2, MSG_ZEROCOPY) == 2); break;
    case PLAIN: CHECK(send(ends.server, bytes, length, 0) == whole); break;
    case NOTHING: CHECK(send(ends.server, bytes, 0, MSG_ZEROCOPY) == 0); return;
    }
    sent += length;
    made += way == SENDMMSG ? 2 : way != PLAIN;
}

static void receive(unsigned long end)
{
    static char got[1 << 16];
    while (received < end) {
        ssize_t count = recv(ends.client, got, sizeof got, 0);
        CHECK(count > 0);
        for (ssize_t at = 0; at < count; at++)
            CHECK((unsigned char)got[at] == of(received + at));
        received += count;
    }
}

/* Receives all that was sent. The answer acknowledges it. */
static void arrive(void)
{
    receive(sent);
    exchange(ends.client, ends.server, "answer\n");
}

static void numbers(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        char *bytes = memory[round % KEPT];
        transmit(round % WAYS, bytes, 2 + round * 977 % (MOST - 2));
        if (round % 3 == 0) {
            /* Its bytes are not needed any more, though nobody has read them. */
            until_completed(ends.server);
            memset(bytes, 'z', MOST);
        }
        arrive();
        if (round % KEPT == KEPT - 1)
            until_completed(ends.server);
    }
    until_completed(ends.server);
}

/* Without the option the flag means nothing. */
static void option(void)
{
    unsigned before = made;
    for (int round = 0; round < 4; round++) {
        enable(ends.server, 0);
        transmit(SEND, memory[0], 1000);
        arrive();
        made = before;
        until_completed(ends.server);
        enable(ends.server, 1);
        transmit(SEND, memory[0], 1000);
        arrive();
        until_completed(ends.server);
        before = made;
    }
}

static void *reads(void *unused)
{
    receive(sent);
    return unused;
}

/* A call that waits for room has one number. */
static void much(void)
{
    pthread_t thread;
    for (size_t at = 0; at < sizeof large; at++)
        large[at] = of(at);
    for (int round = 0; round < 3; round++) {
        sent += sizeof large;
        CHECK(pthread_create(&thread, NULL, reads, NULL) == 0);
        CHECK(send(ends.server, large, sizeof large, MSG_ZEROCOPY) == (ssize_t)sizeof large);
        made++;
        CHECK(pthread_join(thread, NULL) == 0);
        exchange(ends.client, ends.server, "answer\n");
        until_completed(ends.server);
    }
}

/* A call that sends nothing has none. */
static void full(void)
{
    ssize_t done;
    CHECK(setsockopt(ends.server, SOL_SOCKET, SO_SNDBUF, &(int){65536}, sizeof(int)) == 0);
    for (size_t at = 0; at < sizeof large; at++)
        large[at] = of(at);
    while ((done = send(ends.server, large + sent, 20000, MSG_ZEROCOPY | MSG_DONTWAIT)) > 0) {
        sent += done, made++;
        CHECK(sent + 20000 <= sizeof large);
    }
    /* ENOBUFS: more completions wait than the kernel has room for. */
    CHECK(done < 0 && (errno == EAGAIN || errno == ENOBUFS));
    arrive();
    until_completed(ends.server);
    transmit(SEND, memory[0], 1000);
    arrive();
    until_completed(ends.server);
}

static void is_polled(void)
{
    for (int round = 0; round < 10; round++) {
        struct pollfd entry = {.fd = ends.server, .events = POLLOUT};
        struct timeval none = {0, 0};
        fd_set read, write;
        FD_ZERO(&read);
        FD_ZERO(&write);
        FD_SET(ends.server, &read);
        FD_SET(ends.server, &write);
        transmit(SEND, memory[0], 1000);
        arrive();
        CHECK(is_pending(ends.server, -1) && is_pending(ends.server, 0));
        CHECK(poll(&entry, 1, 0) == 1 && entry.revents == (POLLOUT | POLLERR));
        CHECK(select(ends.server + 1, &read, &write, NULL, &none) == 2 && FD_ISSET(ends.server, &read) && FD_ISSET(ends.server, &write));
        until_completed(ends.server);
        CHECK(poll(&entry, 1, 0) == 1 && entry.revents == POLLOUT);
        CHECK(select(ends.server + 1, &read, NULL, NULL, &none) == 0);
    }
}

static int put(int set, int operation, int fd, unsigned events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    CHECK(epoll_ctl(set, operation, fd, &event) == 0);
    return set;
}

static int new_set(int fd, unsigned events)
{
    int set = epoll_create1(0);
    CHECK(set >= 0);
    return put(set, EPOLL_CTL_ADD, fd, events);
}

/* Whether a set reports this descriptor with this event, and nothing else. */
static int reports(int set, int fd, unsigned wanted, int limit)
{
    struct epoll_event events[4];
    int count = epoll_wait(set, events, 4, limit);
    CHECK(count == 0 || (count == 1 && events[0].data.fd == fd && events[0].events == wanted));
    return count;
}

static void levels(void)
{
    int set = new_set(ends.server, 0);
    for (int round = 0; round < 10; round++) {
        CHECK(!reports(set, ends.server, EPOLLERR, 0));
        transmit(SEND, memory[0], 1000);
        for (int again = 0; again < 3; again++)
            CHECK(reports(set, ends.server, EPOLLERR, -1));
        arrive();
        CHECK(reports(set, ends.server, EPOLLERR, 0));
        until_completed(ends.server);
    }
    close(set);
}

/* Each completion is an edge, read or not. */
static void edges(void)
{
    int set = new_set(ends.server, EPOLLET);
    for (int round = 0; round < 10; round++) {
        CHECK(!reports(set, ends.server, EPOLLERR, 0));
        for (int again = 0; again < 3; again++) {
            transmit(SEND, memory[again], 1000);
            CHECK(reports(set, ends.server, EPOLLERR, -1) && !reports(set, ends.server, EPOLLERR, 0));
            arrive();
            CHECK(!reports(set, ends.server, EPOLLERR, 0));
        }
        put(set, EPOLL_CTL_MOD, ends.server, EPOLLET);
        CHECK(reports(set, ends.server, EPOLLERR, 0) && !reports(set, ends.server, EPOLLERR, 0));
        until_completed(ends.server);
    }
    close(set);
}

static void one_shots(void)
{
    int set = new_set(ends.server, EPOLLONESHOT);
    for (int round = 0; round < 10; round++) {
        transmit(SEND, memory[0], 1000);
        CHECK(reports(set, ends.server, EPOLLERR, -1) && !reports(set, ends.server, EPOLLERR, 0));
        arrive();
        transmit(SEND, memory[1], 1000);
        arrive();
        CHECK(!reports(set, ends.server, EPOLLERR, 0));
        put(set, EPOLL_CTL_MOD, ends.server, EPOLLONESHOT);
        CHECK(reports(set, ends.server, EPOLLERR, 0) && !reports(set, ends.server, EPOLLERR, 0));
        until_completed(ends.server);
        put(set, EPOLL_CTL_MOD, ends.server, EPOLLONESHOT);
    }
    close(set);
}

/* Sets to which a socket is added that is ready, and sets in sets. */
static void sets(void)
{
    for (int round = 0; round < 10; round++) {
        transmit(SEND, memory[0], 1000);
        arrive();
        CHECK(is_pending(ends.server, -1));
        int level = new_set(ends.server, 0), edge = new_set(ends.server, EPOLLET), outer = new_set(level, EPOLLIN);
        CHECK(reports(level, ends.server, EPOLLERR, 0) && reports(outer, level, EPOLLIN, 0));
        CHECK(reports(edge, ends.server, EPOLLERR, 0) && !reports(edge, ends.server, EPOLLERR, 0));
        until_completed(ends.server);
        CHECK(!reports(level, ends.server, EPOLLERR, 0) && !reports(outer, level, EPOLLIN, 0));
        transmit(SEND, memory[0], 1000);
        CHECK(reports(outer, level, EPOLLIN, -1) && poll(&(struct pollfd){.fd = level, .events = POLLIN}, 1, 0) == 1);
        arrive();
        until_completed(ends.server);
        CHECK(!reports(outer, level, EPOLLIN, 0) && poll(&(struct pollfd){.fd = level, .events = POLLIN}, 1, 0) == 0);
        close(level), close(edge), close(outer);
    }
}

static int how_to_wait, set_in, set_out;
static volatile int sleeper, returned;

static void *waits(void *unused)
{
    fd_set read;
    FD_ZERO(&read);
    FD_SET(ends.server, &read);
    sleeper = syscall(SYS_gettid);
    switch (how_to_wait) {
    case 0: CHECK(is_pending(ends.server, -1)); break;
    case 1: CHECK(select(ends.server + 1, &read, NULL, NULL, NULL) == 1); break;
    case 2: CHECK(reports(set_in, ends.server, EPOLLERR, -1)); break;
    default: CHECK(reports(set_out, set_in, EPOLLIN, -1));
    }
    returned = 1;
    return unused;
}

/* Waits until the thread is seen to sleep, so many times. */
static void until_asleep(int times)
{
    char path[64], text[512];
    for (int seen = 0; seen < times;) {
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper);
        FILE *file = fopen(path, "r");
        CHECK(file != NULL);
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        char *end = strrchr(text, ')');
        seen += end && end[2] == 'S';
        fclose(file);
        sched_yield();
    }
}

/* Threads that sleep, in sets that are older than the first such send and that are not. */
static void sleeps(void)
{
    set_in = new_set(ends.server, 0), set_out = new_set(set_in, EPOLLIN);
    for (int round = 0; round < 16; round++) {
        pthread_t thread;
        /* From the last one on: no call before has looked at the sets. */
        how_to_wait = 3 - round % 4, sleeper = returned = 0;
        CHECK(pthread_create(&thread, NULL, waits, NULL) == 0);
        while (!sleeper)
            sched_yield();
        until_asleep(20);
        CHECK(!returned);
        transmit(SEND, memory[0], 1000);
        CHECK(pthread_join(thread, NULL) == 0);
        arrive();
        until_completed(ends.server);
    }
    close(set_in), close(set_out);
}

static void send_one(void)
{
    transmit(SEND, memory[0], 1000);
    arrive();
    CHECK(is_pending(ends.server, -1));
    completed++;
}

/* Ways to read a completion that say less of it. */
static void calls(void)
{
    char control[200], bytes[8];
    struct sockaddr_in name;
    socklen_t size = sizeof name;
    for (int round = 0; round < 4; round++) {
        struct iovec piece = {bytes, sizeof bytes};
        struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = 20};
        struct mmsghdr several[2] = {{.msg_hdr = message}, {.msg_hdr = message}};
        send_one();
        CHECK(recvmsg(ends.server, &message, MSG_ERRQUEUE) == 0 && message.msg_flags == (MSG_ERRQUEUE | MSG_CTRUNC));
        CHECK(message.msg_controllen == 20 && CMSG_FIRSTHDR(&message)->cmsg_len == 20);
        send_one();
        message.msg_control = NULL;
        CHECK(recvmsg(ends.server, &message, MSG_ERRQUEUE | MSG_DONTWAIT) == 0 && message.msg_flags == (MSG_ERRQUEUE | MSG_CTRUNC));
        CHECK(message.msg_controllen == 0);
        send_one();
        CHECK(recv(ends.server, bytes, 1, MSG_ERRQUEUE) == 0);
        CHECK(recv(ends.server, bytes, 1, MSG_ERRQUEUE) == -1 && errno == EAGAIN);
        send_one();
        CHECK(recvfrom(ends.server, bytes, 1, MSG_ERRQUEUE, (struct sockaddr *)&name, &size) == 0 && size == 0);
        size = sizeof name;
        send_one();
        several[0].msg_hdr.msg_controllen = sizeof control;
        CHECK(recvmmsg(ends.server, several, 2, MSG_ERRQUEUE, NULL) == 1 && several[0].msg_len == 0);
        CHECK(several[0].msg_hdr.msg_flags == MSG_ERRQUEUE && several[0].msg_hdr.msg_controllen > 20);
        /* Another descriptor of the socket. */
        int copy = dup(ends.server);
        CHECK(copy >= 0);
        transmit(SEND, memory[0], 1000);
        arrive();
        until_completed(copy);
        close(copy);
    }
}

enum { SENDERS = 2, SENDS = 100 };

static void *sends(void *bytes)
{
    for (int round = 0; round < SENDS; round++) {
        ssize_t done;
        /* ENOBUFS: more completions wait than the kernel has room for. */
        while ((done = send(ends.server, bytes, MOST, MSG_ZEROCOPY)) < 0 && errno == ENOBUFS)
            sched_yield();
        CHECK(done == MOST);
    }
    return bytes;
}

static void *counts(void *letters)
{
    static char got[1 << 16];
    long left = (long)SENDERS * SENDS * MOST;
    while (left > 0) {
        ssize_t count = recv(ends.client, got, sizeof got, 0);
        CHECK(count > 0);
        for (ssize_t at = 0; at < count; at++) {
            CHECK(got[at] >= 'a' && got[at] < 'a' + SENDERS);
            ((long *)letters)[got[at] - 'a']++;
        }
        left -= count;
    }
    return letters;
}

/* Threads that send on one connection: each send has a number of its own. */
static void together(void)
{
    pthread_t threads[SENDERS], reader;
    long letters[SENDERS] = {0};
    CHECK(pthread_create(&reader, NULL, counts, letters) == 0);
    for (int at = 0; at < SENDERS; at++) {
        memset(memory[at], 'a' + at, MOST);
        CHECK(pthread_create(&threads[at], NULL, sends, memory[at]) == 0);
    }
    while (completed < SENDERS * SENDS)
        CHECK(is_pending(ends.server, -1) && take(ends.server) > 0);
    for (int at = 0; at < SENDERS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    CHECK(pthread_join(reader, NULL) == 0);
    for (int at = 0; at < SENDERS; at++)
        CHECK(letters[at] == (long)SENDS * MOST);
    made = completed;
    until_completed(ends.server);
}

/* Over IPv6, or on a socket that has the option from its listener. */
static struct pair connect_with(int family, int on)
{
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr *address = family == AF_INET6 ? (struct sockaddr *)&six : (struct sockaddr *)&four;
    socklen_t length = family == AF_INET6 ? sizeof six : sizeof four;
    int listener = socket(family, SOCK_STREAM, 0);
    if (on)
        enable(listener, 1);
    CHECK(bind(listener, address, length) == 0 && listen(listener, 16) == 0);
    CHECK(getsockname(listener, address, &length) == 0);
    struct pair made_now = {-1, socket(family, SOCK_STREAM, 0)};
    CHECK(connect(made_now.client, address, length) == 0);
    CHECK((made_now.server = accept(listener, NULL, NULL)) >= 0);
    close(listener);
    return made_now;
}

static const struct test_case cases[] = {
    {"numbers", numbers}, {"option", option},       {"much", much},     {"full", full},   {"polled", is_polled},
    {"levels", levels},   {"edges", edges},         {"one shots", one_shots}, {"sets", sets}, {"sleeps", sleeps},
    {"calls", calls},     {"together", together},   {"IPv6", numbers},  {"accepted", numbers},
};

static void play(const struct test_case *one, int is_moved)
{
    int is_accepted = strcmp(one->name, "accepted") == 0, on = 0;
    socklen_t size = sizeof on;
    /* What a failure is in. */
    fprintf(stderr, "%s\n", one->name);
    is_ipv6 = strcmp(one->name, "IPv6") == 0;
    sent = received = made = completed = 0;
    ends = connect_with(is_ipv6 ? AF_INET6 : AF_INET, is_accepted);
    if (!is_accepted)
        enable(ends.server, 1);
    CHECK(getsockopt(ends.server, SOL_SOCKET, SO_ZEROCOPY, &on, &size) == 0 && on == 1);
    exchange(ends.client, ends.server, "hello\n");
    exchange(ends.server, ends.client, "hello\n");
    if (is_moved)
        exchange_until_on_nic(ends, ends.server), exchange_until_on_nic(ends, ends.client);
    one->run();
    /* None of this has brought it back. */
    CHECK(!is_moved || is_on_nic(ends.server));
    close(ends.server), close(ends.client);
}

int main(int count, char **words)
{
    int played = 0;
    CHECK(count >= 2);
    alarm(STANDS_STILL);
    for (size_t at = 0; at < sizeof cases / sizeof cases[0]; at++) {
        if (strcmp(words[1], "all") == 0 || strcmp(words[1], cases[at].name) == 0)
            play(&cases[at], count > 2), played++;
    }
    CHECK(played > 0);
    return 0;
}

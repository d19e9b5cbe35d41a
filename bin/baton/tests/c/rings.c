/* A program that drives rings of io_uring(7) by itself, with the C library's syscall(3).
 *
 *     rings CASE [moved]
 *
 * With "moved" its connections are on the NIC before a ring is used, and each case says which of them are afterwards. */

#include "sockets.h"
#include <linux/io_uring.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define NO_SQARRAY (1U << 16)

static int moved;

/* A ring, mapped as libuv does it. */
struct ring {
    int fd;
    unsigned mask, shift, *head, *tail, *array, *done_head, *done_tail, *done_mask;
    char *entries;
    struct io_uring_cqe *completions;
};

/* None (fd -1) if this kernel does not know the flags. */
static struct ring set_up(unsigned size, unsigned flags)
{
    struct io_uring_params made = {.flags = flags};
    struct ring ring = {.fd = syscall(SYS_io_uring_setup, size, &made)};
    if (ring.fd < 0) {
        CHECK(errno == EINVAL);
        return ring;
    }
    ring.shift = flags & IORING_SETUP_SQE128 ? 7 : 6;
    size_t here = made.sq_off.array + made.sq_entries * sizeof(unsigned);
    size_t there = made.cq_off.cqes + made.cq_entries * sizeof(struct io_uring_cqe);
    int protection = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_POPULATE;
    char *queue = mmap(NULL, here > there ? here : there, protection, how, ring.fd, IORING_OFF_SQ_RING);
    ring.entries = mmap(NULL, (size_t)made.sq_entries << ring.shift, protection, how, ring.fd, IORING_OFF_SQES);
    CHECK(queue != MAP_FAILED && ring.entries != MAP_FAILED);
    ring.mask = made.sq_entries - 1;
    ring.head = (unsigned *)(queue + made.sq_off.head);
    ring.tail = (unsigned *)(queue + made.sq_off.tail);
    ring.array = flags & NO_SQARRAY ? NULL : (unsigned *)(queue + made.sq_off.array);
    ring.done_head = (unsigned *)(queue + made.cq_off.head);
    ring.done_tail = (unsigned *)(queue + made.cq_off.tail);
    ring.done_mask = (unsigned *)(queue + made.cq_off.ring_mask);
    ring.completions = (struct io_uring_cqe *)(queue + made.cq_off.cqes);
    return ring;
}

/* The next entry, empty but for these, which nobody takes before `publish`. With an array the entries are taken from the
 * end, so that the array matters. */
static struct io_uring_sqe *prepare(struct ring *ring, int operation, int fd, unsigned long data)
{
    unsigned slot = *ring->tail & ring->mask, index = ring->array ? ring->mask - slot : slot;
    CHECK(*ring->tail - __atomic_load_n(ring->head, __ATOMIC_ACQUIRE) <= ring->mask);
    struct io_uring_sqe *entry = (struct io_uring_sqe *)(ring->entries + ((size_t)index << ring->shift));
    memset(entry, 0, sizeof *entry);
    entry->opcode = operation;
    entry->fd = fd;
    entry->user_data = data;
    if (ring->array)
        ring->array[slot] = index;
    return entry;
}

static void publish(struct ring *ring)
{
    __atomic_store_n(ring->tail, *ring->tail + 1, __ATOMIC_RELEASE);
}

/* The same, published at once: its other words may be written as long as no thread enters the ring. */
static struct io_uring_sqe *add(struct ring *ring, int operation, int fd, unsigned long data)
{
    struct io_uring_sqe *entry = prepare(ring, operation, fd, data);
    publish(ring);
    return entry;
}

static struct io_uring_sqe *add_control(struct ring *ring, int set, int operation, int fd, struct epoll_event *event, unsigned long data)
{
    struct io_uring_sqe *entry = prepare(ring, IORING_OP_EPOLL_CTL, set, data);
    entry->addr = (unsigned long)event;
    entry->len = operation;
    entry->off = fd;
    publish(ring);
    return entry;
}

static void enter(struct ring *ring, unsigned count, unsigned least)
{
    CHECK(syscall(SYS_io_uring_enter, ring->fd, count, least, least ? IORING_ENTER_GETEVENTS : 0, NULL, 0) == count);
}

/* The next completion's result, of the entry with this data. Waits for it. */
static int result(struct ring *ring, unsigned long data)
{
    while (*ring->done_head == __atomic_load_n(ring->done_tail, __ATOMIC_ACQUIRE))
        CHECK(syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 0);
    struct io_uring_cqe *completion = &ring->completions[*ring->done_head & *ring->done_mask];
    int got = completion->res;
    CHECK(completion->user_data == data);
    __atomic_store_n(ring->done_head, *ring->done_head + 1, __ATOMIC_RELEASE);
    return got;
}

/* A connection, on the NIC if it is to move. */
static struct pair connected(void)
{
    struct pair pair = connect_used(moved);
    if (moved)
        until_on_nic(pair.client);
    return pair;
}

/* Waits until an end is where it is expected: by a case that leaves it there for good. */
static void stays(int fd, int on_nic)
{
    for (int round = 0; round < 200; round++)
        CHECK(!moved || is_on_nic(fd) == on_nic);
}

static unsigned long reported(int set, unsigned events)
{
    struct epoll_event event;
    CHECK(epoll_wait(set, &event, 1, -1) == 1 && event.events == events);
    return event.data.u64;
}

static void quiet(int set)
{
    struct epoll_event event;
    CHECK(epoll_wait(set, &event, 1, 0) == 0);
}

static void take(int fd)
{
    char byte;
    CHECK(read(fd, &byte, 1) == 1);
}

/* Entries that are epoll_ctl(2), some of which fail: the next one has effect only after them. */
static void control_by(unsigned flags)
{
    struct ring ring = set_up(8, flags);
    if (ring.fd < 0)
        return;
    struct pair pair = connected();
    int set = epoll_create1(0), ends[2];
    CHECK(pipe(ends) == 0);
    struct epoll_event in[] = {{EPOLLIN, {.u64 = 100}}, {EPOLLIN, {.u64 = 200}}, {EPOLLIN | EPOLLET, {.u64 = 300}}, {EPOLLIN, {.u64 = 301}}};
    add_control(&ring, set, EPOLL_CTL_ADD, pair.server, &in[0], 1);
    add_control(&ring, set, EPOLL_CTL_ADD, ends[0], &in[1], 2);
    add_control(&ring, set, EPOLL_CTL_ADD, pair.server, &in[2], 3);
    add_control(&ring, set, EPOLL_CTL_MOD, pair.client, &in[2], 4);
    add_control(&ring, set, EPOLL_CTL_ADD, pair.client, &in[2], 5);
    add_control(&ring, set, EPOLL_CTL_MOD, pair.client, &in[3], 6);
    enter(&ring, 6, 6);
    int expected[] = {0, 0, -EEXIST, -ENOENT, 0, 0};
    for (int at = 0; at < 6; at++)
        CHECK(result(&ring, at + 1) == expected[at]);
    quiet(set);
    CHECK(write(pair.client, "a", 1) == 1 && reported(set, EPOLLIN) == 100);
    take(pair.server);
    quiet(set);
    CHECK(write(pair.server, "b", 1) == 1 && reported(set, EPOLLIN) == 301);
    take(pair.client);
    CHECK(write(ends[1], "c", 1) == 1 && reported(set, EPOLLIN) == 200);
    take(ends[0]);
    /* Around the ring, each time with data of its own; half of the times nobody waits for the completion. */
    for (unsigned long round = 1000; round < 1060; round++) {
        struct epoll_event event = {EPOLLIN | (round % 3 == 0 ? EPOLLONESHOT : 0), {.u64 = round}};
        add_control(&ring, set, EPOLL_CTL_MOD, pair.server, &event, round);
        enter(&ring, 1, round % 2);
        CHECK(result(&ring, round) == 0 && write(pair.client, "d", 1) == 1 && reported(set, EPOLLIN) == round);
        take(pair.server);
    }
    /* There is no such event: the kernel goes no further, but for a ring that says so. Then what is gone, and what was never there. */
    add_control(&ring, set, EPOLL_CTL_MOD, pair.server, (struct epoll_event *)8, 7);
    add_control(&ring, set, EPOLL_CTL_MOD, pair.server, &in[0], 70);
    unsigned left = flags & IORING_SETUP_SUBMIT_ALL ? 0 : 1;
    CHECK(syscall(SYS_io_uring_enter, ring.fd, 2, 0, 0, NULL, 0) == 2 - left && result(&ring, 7) == -EFAULT);
    CHECK(write(pair.client, "e", 1) == 1);
    if (left) {
        quiet(set);
        enter(&ring, 1, 1);
    }
    CHECK(result(&ring, 70) == 0 && reported(set, EPOLLIN) == 100);
    take(pair.server);
    add_control(&ring, set, EPOLL_CTL_DEL, pair.server, NULL, 8);
    add_control(&ring, set, EPOLL_CTL_DEL, pair.server, NULL, 9);
    add_control(&ring, set, EPOLL_CTL_DEL, 700, NULL, 10);
    add_control(&ring, 700, EPOLL_CTL_DEL, pair.client, NULL, 11);
    add_control(&ring, pair.client, EPOLL_CTL_ADD, pair.server, &in[0], 12);
    enter(&ring, 5, 0);
    int after[] = {0, -ENOENT, -EBADF, -EBADF, -EINVAL};
    for (int at = 0; at < 5; at++)
        CHECK(result(&ring, at + 8) == after[at]);
    CHECK(write(pair.client, "e", 1) == 1);
    take(pair.server);
    quiet(set);
    /* An entry that the program has put into the ring is the program's own until it is submitted. */
    add_control(&ring, set, EPOLL_CTL_ADD, pair.server, &in[0], 13);
    CHECK(syscall(SYS_io_uring_enter, ring.fd, 0, 0, 0, NULL, 0) == 0);
    CHECK(write(pair.client, "f", 1) == 1);
    quiet(set);
    enter(&ring, 1, 1);
    CHECK(result(&ring, 13) == 0 && reported(set, EPOLLIN) == 100);
    take(pair.server);
    stays(pair.server, 1);
    stays(pair.client, 1);
    close(ring.fd);
    CHECK(syscall(SYS_io_uring_enter, ring.fd, 1, 0, 0, NULL, 0) == -1 && errno == EBADF);
    CHECK(write(pair.client, "g", 1) == 1 && reported(set, EPOLLIN) == 100);
    take(pair.server);
}

static void control(void)
{
    control_by(0);
    control_by(NO_SQARRAY);
    control_by(IORING_SETUP_SQE128 | IORING_SETUP_SUBMIT_ALL);
    control_by(IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
}

/* An entry that waits for another one: when it is made, if ever, only the kernel knows. */
static void linked(void)
{
    struct ring ring = set_up(8, 0);
    struct pair pair = connected(), other = connected();
    int set = epoll_create1(0);
    struct epoll_event first = {EPOLLIN, {.u64 = 1}}, second = {EPOLLIN, {.u64 = 2}};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &first) == 0);
    add(&ring, IORING_OP_NOP, -1, 1)->flags = IOSQE_IO_LINK;
    add_control(&ring, set, EPOLL_CTL_MOD, pair.server, &second, 2);
    add_control(&ring, set, EPOLL_CTL_ADD, other.server, &first, 3);
    enter(&ring, 3, 3);
    for (int at = 1; at <= 3; at++) {
        unsigned long data = ring.completions[*ring.done_head & *ring.done_mask].user_data;
        CHECK(result(&ring, data) == 0);
    }
    CHECK(write(pair.client, "a", 1) == 1 && reported(set, EPOLLIN) == 2);
    take(pair.server);
    CHECK(write(other.client, "a", 1) == 1 && reported(set, EPOLLIN) == 1);
    take(other.server);
    stays(pair.server, 0);
    stays(other.server, 1);
    /* The chain ends with an error: this one is not made. */
    add(&ring, IORING_OP_CLOSE, 700, 4)->flags = IOSQE_IO_LINK;
    add_control(&ring, set, EPOLL_CTL_DEL, pair.server, NULL, 5);
    enter(&ring, 2, 2);
    CHECK(result(&ring, 4) == -EBADF && result(&ring, 5) == -ECANCELED);
    CHECK(write(pair.client, "a", 1) == 1 && reported(set, EPOLLIN) == 2);
}

/* Entries that receive, send, wait and shut down: what they name is the kernel's, other connections are not. */
static void transfer(void)
{
    struct ring ring = set_up(4, 0);
    struct pair pair = connected(), polled = connected(), vector = connected(), other = connected();
    char got[100] = {0}, text[] = "sent by the ring";
    struct iovec piece = {got, sizeof got};
    struct io_uring_sqe *entry = add(&ring, IORING_OP_RECV, pair.server, 1);
    entry->addr = (unsigned long)got;
    entry->len = sizeof got;
    enter(&ring, 1, 0);
    CHECK(write(pair.client, "there", 5) == 5 && result(&ring, 1) == 5 && memcmp(got, "there", 5) == 0);
    entry = add(&ring, IORING_OP_SEND, pair.server, 2);
    entry->addr = (unsigned long)text;
    entry->len = sizeof text;
    add(&ring, IORING_OP_POLL_ADD, polled.server, 3)->poll_events = EPOLLIN;
    enter(&ring, 2, 1);
    CHECK(result(&ring, 2) == sizeof text && read(pair.client, got, sizeof got) == sizeof text && strcmp(got, text) == 0);
    CHECK(write(polled.client, "x", 1) == 1 && result(&ring, 3) & EPOLLIN);
    entry = add(&ring, IORING_OP_READV, vector.server, 4);
    entry->addr = (unsigned long)&piece;
    entry->len = 1;
    enter(&ring, 1, 0);
    CHECK(write(vector.client, "vector", 6) == 6 && result(&ring, 4) == 6 && memcmp(got, "vector", 6) == 0);
    exchange(pair.client, pair.server, "as before\n");
    exchange(pair.server, pair.client, "as before\n");
    take(polled.server);
    exchange(other.client, other.server, "as before\n");
    stays(pair.server, 0);
    stays(polled.server, 0);
    stays(vector.server, 0);
    stays(pair.client, 1);
    stays(other.server, 1);
    add(&ring, IORING_OP_SHUTDOWN, pair.server, 5)->len = SHUT_WR;
    enter(&ring, 1, 1);
    CHECK(result(&ring, 5) == 0 && read(pair.client, got, 1) == 0);
}

/* Registered files: entries name them by their place. */
static void registered(void)
{
    struct ring ring = set_up(4, 0);
    struct pair pair = connected(), later = connected(), other = connected();
    char got[10];
    int files[] = {-1, pair.server};
    CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, files, 2) == 0);
    struct io_uring_files_update update = {.offset = 0, .fds = (unsigned long)&later.server};
    CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES_UPDATE, &update, 1) == 1);
    struct pair pairs[] = {later, pair};
    for (int at = 0; at < 2; at++) {
        struct io_uring_sqe *entry = add(&ring, IORING_OP_RECV, at, at);
        entry->flags = IOSQE_FIXED_FILE;
        entry->addr = (unsigned long)got;
        entry->len = sizeof got;
        enter(&ring, 1, 0);
        CHECK(write(pairs[at].client, "there", 5) == 5 && result(&ring, at) == 5 && memcmp(got, "there", 5) == 0);
        stays(pairs[at].server, 0);
    }
    stays(other.server, 1);
    exchange(other.server, other.client, "as before\n");
}

/* An entry that closes a connection, whose number another one then gets. */
static void closed(void)
{
    struct ring ring = set_up(4, 0);
    struct pair pair = connected(), next;
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    int set = epoll_create1(0);
    char byte;
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event) == 0);
    add(&ring, IORING_OP_CLOSE, pair.server, 1);
    enter(&ring, 1, 1);
    CHECK(result(&ring, 1) == 0 && read(pair.client, &byte, 1) == 0);
    quiet(set);
    next = connected();
    CHECK(dup(next.server) == pair.server);
    quiet(set);
    exchange(next.client, pair.server, "next\n");
    exchange(pair.server, next.client, "next\n");
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event) == 0 && write(next.client, "x", 1) == 1 && reported(set, EPOLLIN) == 1);
}

/* Its connections stay in the kernel for good, this one, which was on the NIC perhaps, too. */
static void never_moves(struct pair pair)
{
    struct pair next = connect_pair();
    for (int round = 0; round < 4000; round++) {
        exchange(next.client, next.server, "there\n");
        exchange(next.server, next.client, "and back\n");
        exchange(pair.client, pair.server, "there\n");
        CHECK(!is_on_nic(next.client) && !is_on_nic(next.server) && !is_on_nic(pair.client) && !is_on_nic(pair.server));
    }
}

/* A ring that a thread of the kernel's polls: nobody sees what is submitted. */
static void polled(void)
{
    struct pair pair = connected();
    CHECK(set_up(4, IORING_SETUP_SQPOLL).fd >= 0);
    never_moves(pair);
}

/* A set that a ring waits for. */
static void waited(void)
{
    struct ring ring = set_up(4, 0);
    struct pair pair = connected();
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    int set = epoll_create1(0);
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event) == 0);
    add(&ring, IORING_OP_POLL_ADD, set, 1)->poll_events = EPOLLIN;
    enter(&ring, 1, 0);
    CHECK(write(pair.client, "x", 1) == 1 && result(&ring, 1) & EPOLLIN && reported(set, EPOLLIN) == 1);
    take(pair.server);
    event.data.u64 = 2;
    CHECK(epoll_ctl(set, EPOLL_CTL_MOD, pair.server, &event) == 0);
    add(&ring, IORING_OP_POLL_ADD, set, 2)->poll_events = EPOLLIN;
    enter(&ring, 1, 0);
    CHECK(write(pair.client, "y", 1) == 1 && result(&ring, 2) & EPOLLIN && reported(set, EPOLLIN) == 2);
    take(pair.server);
    never_moves(pair);
}

/* A ring under a number that the library has not seen it get. */
static void unknown(void)
{
    struct ring ring = set_up(4, 0);
    struct pair pair = connected();
    int copy;
    __asm__ volatile("syscall" : "=a"(copy) : "a"(SYS_dup), "D"((long)ring.fd) : "rcx", "r11", "memory");
    CHECK(copy >= 0);
    add(&ring, IORING_OP_NOP, -1, 1);
    CHECK(syscall(SYS_io_uring_enter, copy, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1 && result(&ring, 1) == 0);
    never_moves(pair);
}

/* A child uses its parent's ring for a set and a connection of its own, and its parent goes on. */
static void forked(void)
{
    struct ring ring = set_up(8, 0);
    struct pair pair = connected();
    struct epoll_event event = {EPOLLIN, {.u64 = 5}};
    int status;
    for (int round = 0; round < 2; round++) {
        pid_t child = round == 0 ? fork() : 0;
        if (child > 0) {
            CHECK(waitpid(child, &status, 0) == child && status == 0);
            continue;
        }
        struct pair own = connect_pair();
        int set = epoll_create1(0);
        add_control(&ring, set, EPOLL_CTL_ADD, own.server, &event, 1);
        enter(&ring, 1, 1);
        CHECK(result(&ring, 1) == 0);
        exchange(own.server, own.client, "to the client\n");
        CHECK(write(own.client, "x", 1) == 1 && reported(set, EPOLLIN) == 5);
        take(own.server);
        if (round == 0)
            _exit(0);
    }
    exchange(pair.client, pair.server, "as before\n");
}

static struct ring shared;
static int many_set;

/* Two threads enter one ring, as they may if they agree about who fills it. */
static void *enter_always(void *unused)
{
    while (__atomic_load_n(&many_set, __ATOMIC_ACQUIRE) >= 0)
        CHECK(syscall(SYS_io_uring_enter, shared.fd, 8, 0, 0, NULL, 0) >= 0);
    return unused;
}

static void together(void)
{
    pthread_t threads[2];
    struct pair pair = connected();
    int set = many_set = epoll_create1(0);
    shared = set_up(8, 0);
    struct epoll_event events[] = {{EPOLLIN, {.u64 = 0}}, {EPOLLIN, {.u64 = 1}}};
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &events[0]) == 0);
    for (int at = 0; at < 2; at++)
        CHECK(pthread_create(&threads[at], NULL, enter_always, NULL) == 0);
    for (unsigned long round = 0; round < 1000; round++) {
        add_control(&shared, set, EPOLL_CTL_DEL, pair.server, NULL, 1);
        add_control(&shared, set, EPOLL_CTL_ADD, pair.server, &events[round % 2], 2);
        for (int at = 1; at <= 2; at++) {
            while (*shared.done_head == __atomic_load_n(shared.done_tail, __ATOMIC_ACQUIRE))
                sched_yield();
            CHECK(result(&shared, at) == 0);
        }
        if (round % 10 == 0) {
            CHECK(write(pair.client, "x", 1) == 1 && reported(set, EPOLLIN) == round % 2);
            take(pair.server);
        }
    }
    __atomic_store_n(&many_set, -1, __ATOMIC_RELEASE);
    for (int at = 0; at < 2; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    stays(pair.server, 1);
}

int main(int count, char **words)
{
    static const struct test_case cases[] = {
        {"control", control}, {"linked", linked}, {"transfer", transfer}, {"registered", registered}, {"closed", closed},
        {"polled", polled}, {"waited", waited}, {"unknown", unknown}, {"forked", forked}, {"together", together},
    };
    alarm(STANDS_STILL);
    CHECK(count > 1);
    moved = count > 2 && strcmp(words[2], "moved") == 0;
    return run_case(cases, sizeof cases / sizeof *cases, words[1]);
}

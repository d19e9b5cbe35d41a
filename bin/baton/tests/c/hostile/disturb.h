/* The thread that disturbs others: signals, cancellation, processes, descriptors that change, connections that come and go. */

#include "filter.h"

#define MOST_CONNECTIONS 3
#define MOST_FLOWS (2 * MOST_CONNECTIONS)

/* A round. */
struct round {
    struct random random;
    unsigned number, disturbances, connection_count, flow_count, made, moved;
    struct connection connections[MOST_CONNECTIONS];
    struct flow flows[MOST_FLOWS];
    /* For handlers: both ends are the program's; and for children, with a peer of its own. */
    struct pair handlers;
    _Atomic unsigned long tried_by_handlers, sent_by_handlers;
    struct connection childrens;
    /* A descriptor that leads nowhere, for numbers that are closed. */
    int tombstone;
    int closed[8], closed_count;
    /* Whether numbers are free for a moment: no other thread may take one then. */
    int closes;
    const char *volatile now;
    pthread_t disturber;
};

static struct round *round_now;
static struct sockaddr_in listens = {.sin_family = AF_INET}, peers_listen = {.sin_family = AF_INET};
static int listener, peers_listener;
static int may_close, may_be_real_time;
/* The round in which a filter is set. */
static int filters_at = -1;

/* A handler that returns. */
static void on_return(int signal)
{
    (void)signal;
}

/* A handler that makes calls itself: on connections of its own, and on what it has interrupted, where it changes nothing. */
static void on_calls(int signal)
{
    int number = errno, waiting;
    struct round *round = round_now;
    (void)signal;
    if (round == NULL)
        return;
    unsigned char byte = 1;
    /* It may be cancelled before it has counted what it has sent. */
    round->tried_by_handlers++;
    if (send(round->handlers.client, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1)
        round->sent_by_handlers++;
    if (mine != NULL) {
        struct pollfd entries[2] = {{mine->connection->fd, POLLIN | POLLOUT, 0}, {round->handlers.server, POLLIN, 0}};
        poll(entries, 2, 0);
        ioctl(mine->connection->fd, FIONREAD, &waiting);
        recv(mine->connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        getsockopt(mine->connection->fd, SOL_SOCKET, SO_ERROR, &waiting, &(socklen_t){sizeof waiting});
    }
    if (!round->closes)
        CHECK(close(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) == 0);
    errno = number;
}

/* A handler that leaves the call, where this can be done. */
static void on_leave(int signal)
{
    (void)signal;
    if (mine == NULL || !mine->may_leave)
        return;
    mine->is_leaving = 1;
    if (mine->is_cancelled) {
        mine->is_leaving = 0;
        return;
    }
    mine->may_leave = 0;
    siglongjmp(mine->back, 1);
}

/* SIGUSR1 lets calls begin again; streams get no other one. */
#define SIGNAL_AGAIN SIGUSR1
#define SIGNAL_RETURN SIGUSR2
#define SIGNAL_CALLS (SIGRTMIN + 1)
#define SIGNAL_LEAVE (SIGRTMIN + 2)

static void set_handlers(struct random *random)
{
    struct {
        int signal;
        void (*handler)(int);
        int flags;
    } all[] = {{SIGNAL_AGAIN, on_return, SA_RESTART}, {SIGNAL_RETURN, on_return, 0}, {SIGNAL_CALLS, on_calls, SA_RESTART}, {SIGNAL_LEAVE, on_leave, SA_RESTART}};
    for (unsigned at = 0; at < sizeof all / sizeof *all; at++) {
        struct sigaction action = {.sa_handler = all[at].handler, .sa_flags = all[at].flags | (one_in(random, 2) ? SA_NODEFER : 0)};
        if (at > 1 && one_in(random, 2))
            action.sa_flags ^= SA_RESTART;
        /* A handler that is left in the middle would not have counted what it has sent. */
        if (all[at].handler == on_calls)
            CHECK(sigaddset(&action.sa_mask, SIGNAL_LEAVE) == 0);
        CHECK(sigaction(all[at].signal, &action, NULL) == 0);
    }
}


static void step_done(struct round *round)
{
    steps++;
    for (unsigned at = 0; at < round->connection_count; at++)
        RAW_CHECK(RAW3(SYS_write, round->connections[at].go, (&(uint64_t){1}), 8));
}

/* Gives other threads some time to get on. */
static void linger(struct random *random)
{
    for (unsigned turns = below(random, 2) ? below(random, 40) : 0; turns > 0; turns--)
        RAW3(SYS_sched_yield, 0, 0, 0);
}

static struct flow *draw_flow(struct round *round)
{
    return &round->flows[below(&round->random, round->flow_count)];
}

static void send_signals(struct round *round)
{
    for (unsigned count = 1 + below(&round->random, 4); count > 0; count--) {
        struct flow *flow = draw_flow(round);
        int signal = (int[]){SIGNAL_AGAIN, SIGNAL_RETURN, SIGNAL_CALLS, SIGNAL_LEAVE}[below(&round->random, 4)];
        pthread_kill(flow->thread, flow->is_stream ? SIGNAL_AGAIN : signal);
        linger(&round->random);
    }
}

/* Cancels a thread, and has another one go on where it was. */
static void cancel_thread(struct round *round)
{
    struct flow *flow = draw_flow(round);
    void *result;
    if (flow->is_stream)
        return;
    round->now = "cancels";
    flow->is_cancelled = 1;
    while (flow->is_leaving)
        RAW3(SYS_sched_yield, 0, 0, 0);
    CHECK(pthread_cancel(flow->thread) == 0);
    /* It may be where it cannot be cancelled, and wait for a peer. */
    is_free = 1;
    step_done(round);
    CHECK(pthread_join(flow->thread, &result) == 0);
    is_free = 0;
    CHECK(result == PTHREAD_CANCELED || flow->is_done);
    flow->is_cancelled = 0;
    CHECK(pthread_create(&flow->thread, NULL, play_flow, flow) == 0);
}

/* The number of a connection changes while threads use it; the old one leads nowhere from then on, or is closed. */
static void change_number(struct round *round)
{
    struct connection *connection = &round->connections[below(&round->random, round->connection_count)];
    if ((size_t)round->closed_count == sizeof round->closed / sizeof *round->closed)
        return;
    for (unsigned at = 0; at < round->flow_count; at++)
        while (round->flows[at].connection == connection && round->flows[at].is_stream && !round->flows[at].has_copy)
            RAW3(SYS_sched_yield, 0, 0, 0);
    int old = connection->fd, new = dup(old);
    CHECK(new >= 0);
    connection->fd = new;
    if (round->closes && one_in(&round->random, 2))
        CHECK(close(old) == 0);
    CHECK(dup2(round->tombstone, old) == old);
    round->closed[round->closed_count++] = old;
}

/* Options and copies that change nothing. */
static void ask_and_copy(struct round *round)
{
    struct connection *connection = &round->connections[below(&round->random, round->connection_count)];
    int fd = connection->fd, value = 1, copy;
    socklen_t length = sizeof value;
    struct sockaddr_in name;
    switch (below(&round->random, 6)) {
    case 0: CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, length) == 0); break;
    case 1: CHECK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &length) == 0 && value == 0); break;
    case 2: CHECK((copy = fcntl(fd, F_DUPFD_CLOEXEC, 0)) >= 0 && close(copy) == 0); break;
    case 3: CHECK(ioctl(fd, FIONREAD, &value) == 0 && value >= 0); break;
    case 4:
        length = sizeof name;
        CHECK(getpeername(fd, (struct sockaddr *)&name, &length) == 0 ? name.sin_family == AF_INET : errno == ENOTCONN);
        break;
    default: CHECK(setsockopt(fd, IPPROTO_IP, IP_TOS, (int[]){16}, sizeof(int)) == 0);
    }
}

/* A connection that comes and goes. */
static void make_connection(void)
{
    struct pair pair = connect_pair();
    exchange(pair.client, pair.server, "there\n");
    exchange(pair.server, pair.client, "and back\n");
    CHECK(close(pair.client) == 0 && close(pair.server) == 0);
}

/* A child uses the connection for children: it receives what the peer has sent before, or sends what the peer receives afterwards. */
static void make_child(struct round *round)
{
    struct random *random = &round->random;
    struct connection *connection = &round->childrens;
    unsigned char got[2048];
    int kind = one_in(random, 6) ? FIRST_PROGRAM + below(random, CHILD_KINDS - FIRST_PROGRAM) : below(random, FIRST_PROGRAM);
    struct errand errand = {below(random, TASKS), connection->fd, NULL, draw_length(random, sizeof got)};
    /* One that nobody saw coming may touch nothing of the NIC's; one that shares its parent's memory, or descriptors, closes them. */
    if (kind == 3 || (errand.task == CLOSES && kind >= 4))
        errand.task = NOTHING;
    errand.bytes = pattern + (errand.task == READS ? connection->peer_sent : connection->peer_got);
    if (errand.task == READS) {
        RAW_CHECK(RAW3(SYS_write, connection->peer, errand.bytes, errand.length));
        connection->peer_sent += errand.length;
    }
    round->now = child_names[kind];
    int status = run_child(kind, &errand);
    if (status != 0)
        fprintf(stderr, "%s, task %d: status %x\n", child_names[kind], errand.task, status);
    CHECK(status == 0);
    for (size_t have = 0; errand.task == WRITES && have < errand.length;) {
        size_t more = RAW_CHECK(RAW3(SYS_read, connection->peer, got + have, errand.length - have));
        CHECK(more > 0);
        have += more;
        if (have == errand.length)
            CHECK(memcmp(got, errand.bytes, errand.length) == 0);
    }
    connection->peer_got += errand.task == WRITES ? errand.length : 0;
}

/* The parent itself uses that connection now and then: it may move. */
static void use_childrens(struct round *round)
{
    struct connection *connection = &round->childrens;
    unsigned char got[64];
    RAW_CHECK(RAW3(SYS_write, connection->peer, pattern + connection->peer_sent, sizeof got));
    CHECK(recv(connection->fd, got, sizeof got, MSG_WAITALL) == sizeof got && memcmp(got, pattern + connection->peer_sent, sizeof got) == 0);
    connection->peer_sent += sizeof got;
    CHECK(write(connection->fd, pattern + connection->peer_got, sizeof got) == sizeof got);
    CHECK(RAW6(SYS_recvfrom, connection->peer, got, sizeof got, MSG_WAITALL, 0, 0) == sizeof got);
    CHECK(memcmp(got, pattern + connection->peer_got, sizeof got) == 0);
    connection->peer_got += sizeof got;
}

static void *disturb(void *of)
{
    struct round *round = of;
    pthread_setname_np(pthread_self(), "disturber");
    if (filters_at == (int)round->number) {
        linger(&round->random);
        round->now = "sets a filter";
        set_filter();
    }
    for (unsigned left = round->disturbances; left > 0; left--) {
        linger(&round->random);
        unsigned kind = below(&round->random, 12);
        round->now = (const char *[]){"signals", "signals", "signals", "signals", "cancels", "cancels", "changes a number", "asks", "connects", "uses", "child",
                                      "child"}[kind];
        switch (kind) {
        case 0:
        case 1:
        case 2:
        case 3: send_signals(round); break;
        case 4:
        case 5: cancel_thread(round); break;
        case 6: change_number(round); break;
        case 7: ask_and_copy(round); break;
        case 8: make_connection(); break;
        case 9: use_childrens(round); break;
        default: make_child(round);
        }
        step_done(round);
    }
    is_free = 1;
    step_done(round);
    round->now = "done";
    return NULL;
}

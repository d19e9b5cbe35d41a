/* Programs that are not simple, in surroundings that are not: rounds of threads that read and write connections while another one disturbs
 * them, all of it drawn from a seed. Usage: hostile SURROUNDING SEED ROUNDS [FIRST]
 *
 * Bytes are numbered, so that each end knows which one comes next, and what a call was left with. A round ends when the peers have said
 * all; one that does not end is reported with where every thread stands. A line a round says what came of calls that depend on no moment;
 * the rest is checked here. */

#include "hostile/watch.h"
#include "hostile/reads.h"
#include <sys/resource.h>

static int open_descriptors(void)
{
    DIR *all = opendir("/proc/self/fd");
    int count = 0;
    CHECK(all != NULL);
    while (readdir(all) != NULL)
        count++;
    CHECK(closedir(all) == 0);
    return count;
}

static long resident(void)
{
    char line[200];
    long total = 0, value;
    FILE *status = fopen("/proc/self/status", "re");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssAnon: %ld", &value) == 1)
            total = value;
    fclose(status);
    return total;
}

static const char *sabotage;
static unsigned last_round;

/* Whether this round is to go wrong in this way, so that a test sees that it is found. */
static int is_sabotaged_since(struct round *round, const char *way)
{
    size_t length = strlen(way);
    return sabotage && strncmp(sabotage, way, length) == 0 && sabotage[length] == ':' && (unsigned)atoi(sabotage + length + 1) <= round->number;
}

static int is_sabotaged(struct round *round, const char *way)
{
    return is_sabotaged_since(round, way) && (unsigned)atoi(sabotage + strlen(way) + 1) == round->number;
}

static int listen_on(struct sockaddr_in *address, int is_raw)
{
    socklen_t length = sizeof *address;
    int fd = is_raw ? RAW_CHECK(RAW3(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) : socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (is_raw) {
        RAW_CHECK(RAW3(SYS_bind, fd, address, length));
        RAW_CHECK(RAW3(SYS_listen, fd, 64, 0));
        RAW_CHECK(RAW3(SYS_getsockname, fd, address, &length));
    } else {
        CHECK(fd >= 0 && bind(fd, (struct sockaddr *)address, length) == 0 && listen(fd, 64) == 0);
        CHECK(getsockname(fd, (struct sockaddr *)address, &length) == 0);
    }
    return fd;
}

/* A connection with a peer, which the program accepts or makes. */
static void open_connection(struct connection *connection, int is_accepted)
{
    if (is_accepted) {
        connection->peer = RAW_CHECK(RAW3(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        RAW_CHECK(RAW3(SYS_connect, connection->peer, &listens, sizeof listens));
        connection->fd = accept(listener, NULL, NULL);
    } else {
        connection->fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(connection->fd, (struct sockaddr *)&peers_listen, sizeof peers_listen) == 0);
        connection->peer = RAW_CHECK(RAW3(SYS_accept4, peers_listener, 0, 0));
    }
    CHECK(connection->fd >= 0);
    /* What waits for an acknowledgement would wait for some 40 ms. */
    RAW_CHECK(RAW6(SYS_setsockopt, connection->peer, IPPROTO_TCP, TCP_NODELAY, (&(int){1}), sizeof(int), 0));
    CHECK(setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)) == 0);
}

static void shrink(struct connection *connection)
{
    RAW_CHECK(RAW6(SYS_setsockopt, connection->peer, SOL_SOCKET, SO_RCVBUF, (&(int){32768}), sizeof(int), 0));
}

static void make_flow(struct round *round, struct connection *connection, int writes)
{
    struct flow *flow = &round->flows[round->flow_count++];
    flow->connection = connection;
    flow->random = part(&round->random);
    flow->writes = writes;
    flow->is_stream = one_in(&round->random, 8);
    flow->total = writes ? draw_length(&round->random, one_in(&round->random, 8) ? MOST : 6000) : connection->peer_sends;
    flow->in_set = -1;
    CHECK(pipe2(flow->pipe, O_CLOEXEC) == 0 && (flow->set = epoll_create1(EPOLL_CLOEXEC)) >= 0);
}

static void open_round(struct round *round)
{
    struct random *random = &round->random;
    round->disturbances = below(random, 8);
    round->closes = may_close && one_in(random, 2);
    round->connection_count = 1 + below(random, 2);
    for (unsigned at = 0; at < round->connection_count; at++) {
        struct connection *connection = &round->connections[at];
        open_connection(connection, !one_in(random, 4));
        connection->random = part(random);
        connection->base = below(random, PATTERN - MOST);
        connection->base_of_program = below(random, PATTERN - MOST);
        connection->peer_sends = draw_length(random, one_in(random, 8) ? MOST : 6000);
        CHECK((connection->go = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0);
        if (one_in(random, 16))
            shrink(connection);
        make_flow(round, connection, 0);
        make_flow(round, connection, 1);
    }
    open_connection(&round->childrens, 1);
    round->handlers = connect_pair();
    CHECK(fcntl(round->handlers.client, F_SETFL, O_NONBLOCK) == 0);
    CHECK((round->tombstone = open("/dev/null", O_PATH | O_CLOEXEC)) >= 0);
    if (may_be_real_time)
        round->flows[below(random, round->flow_count)].is_real_time = 1;
    set_handlers(random);
}

static void play_threads(struct round *round)
{
    sigset_t all, before;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    for (unsigned at = 0; at < round->connection_count; at++)
        CHECK(pthread_create(&round->connections[at].thread, NULL, play_peer, &round->connections[at]) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    for (unsigned at = 0; at < round->flow_count; at++)
        CHECK(pthread_create(&round->flows[at].thread, NULL, play_flow, &round->flows[at]) == 0);
    CHECK(pthread_create(&round->disturber, NULL, disturb, round) == 0);
    CHECK(pthread_join(round->disturber, NULL) == 0);
    for (unsigned at = 0; at < round->flow_count; at++)
        CHECK(pthread_join(round->flows[at].thread, NULL) == 0);
    for (unsigned at = 0; at < round->connection_count; at++)
        CHECK(pthread_join(round->connections[at].thread, NULL) == 0);
}

/* A call's result: depends on no moment here. */
static void tell(const char *name, long done)
{
    if (done < 0)
        printf(" %s:%d", name, -errno);
    else
        printf(" %s:%ld", name, done);
}

/* Calls after the end of a stream, and after the peer has gone. */
static void tell_end(struct round *round, struct connection *connection)
{
    unsigned char byte = 0;
    int fd = connection->fd, value = 0;
    struct pollfd entry = {fd, POLLIN | POLLOUT | POLLRDHUP, 0};
    tell("recv", recv(fd, &byte, 1, 0));
    tell("send", send(fd, &byte, 1, MSG_NOSIGNAL));
    tell("poll", poll(&entry, 1, 0));
    tell("events", entry.revents);
    tell("error", getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &(socklen_t){sizeof value}) ? -1 : value);
    tell("waiting", ioctl(fd, FIONREAD, &value) ? -1 : value);
    /* Whether there is still a connection depends on when its last acknowledgement comes. */
    CHECK(shutdown(fd, (int)below(&round->random, 3)) == 0 || errno == ENOTCONN);
    tell("close", close(fd));
    tell("closed", recv(fd, &byte, 1, 0));
}

/* A peer that resets its connection; everything before has been received. */
static void tell_reset(struct round *round)
{
    struct connection *connection = &round->childrens;
    struct linger linger = {1, 0};
    struct pollfd entry = {connection->fd, POLLIN, 0};
    unsigned char byte = 0;
    if (one_in(&round->random, 2)) {
        RAW_CHECK(RAW6(SYS_setsockopt, connection->peer, SOL_SOCKET, SO_LINGER, &linger, sizeof linger, 0));
        RAW_CHECK(RAW3(SYS_close, connection->peer, 0, 0));
        tell("reset", poll(&entry, 1, -1));
        tell("events", entry.revents);
        tell("recv", recv(connection->fd, &byte, 1, 0));
        tell("recv", recv(connection->fd, &byte, 1, 0));
        tell("send", send(connection->fd, &byte, 1, MSG_NOSIGNAL));
    } else {
        RAW_CHECK(RAW3(SYS_close, connection->peer, 0, 0));
        tell("gone", poll(&entry, 1, -1));
        tell("recv", recv(connection->fd, &byte, 1, 0));
    }
    CHECK(close(connection->fd) == 0);
}

static void close_round(struct round *round)
{
    for (unsigned at = 0; at < round->connection_count; at++) {
        struct connection *connection = &round->connections[at];
        CHECK(round->flows[2 * at].at == connection->peer_sends && connection->peer_got == round->flows[2 * at + 1].total);
        round->moved += round->flows[2 * at].was_on_nic;
        printf(" |");
        tell_end(round, connection);
        RAW_CHECK(RAW3(SYS_close, connection->peer, 0, 0));
        CHECK(close(connection->go) == 0);
    }
    for (unsigned at = 0; at < round->flow_count; at++) {
        struct flow *flow = &round->flows[at];
        CHECK(close(flow->pipe[0]) == 0 && close(flow->pipe[1]) == 0 && close(flow->set) == 0);
    }
    for (int at = 0; at < round->closed_count; at++)
        CHECK(close(round->closed[at]) == 0);
    printf(" |");
    tell_reset(round);
    unsigned long got = 0;
    unsigned char bytes[512];
    CHECK(close(round->handlers.client) == 0);
    for (ssize_t more; (more = recv(round->handlers.server, bytes, sizeof bytes, 0)) != 0; got += more)
        CHECK(more > 0);
    CHECK(got >= round->sent_by_handlers && got <= round->tried_by_handlers);
    CHECK(close(round->handlers.server) == 0 && (is_sabotaged_since(round, "leak") || close(round->tombstone) == 0));
}

static void play_round(uint64_t seed, unsigned number)
{
    struct round *round = mmap(NULL, sizeof *round, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static unsigned long moved, all;
    CHECK(round != MAP_FAILED);
    round->random = (struct random){seed * 1000003 + number};
    draw(&round->random);
    round->number = number;
    open_round(round);
    is_free = 0;
    round_now = round;
    if (is_sabotaged(round, "byte"))
        RAW_CHECK(RAW6(SYS_sendto, round->connections[0].peer, "\x01", 1, 0, 0, 0));
    if (is_sabotaged(round, "hang"))
        RAW3(SYS_pause, 0, 0, 0);
    if (is_sabotaged(round, "memory"))
        memset(malloc(8 << 20), 1, 8 << 20);
    if (is_sabotaged(round, "crash"))
        __builtin_trap();
    play_threads(round);
    round_now = NULL;
    printf("round %u:", number);
    close_round(round);
    printf("%s\n", is_sabotaged(round, "result") ? " more" : "");
    fflush(stdout);
    moved += round->moved, all += round->connection_count;
    CHECK(munmap(round, sizeof *round) == 0);
    rounds_done++;
    RAW6(SYS_futex, &rounds_done, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
    if (number % 16 == 15 || number == last_round)
        printf("state: %d descriptors %ld KB %lu of %lu on the NIC\n", open_descriptors(), resident(), moved, all);
}

/* Rounds of which each process plays only so many, half of them before it filters its system calls, after which it stays as it is. */
#define FILTERED_ROUNDS 16

static void play_filtered(char **words, unsigned first, unsigned count)
{
    for (unsigned at = first; at < first + count; at += FILTERED_ROUNDS) {
        char from[24], many[24], *of_part[] = {self_path, "filtering", words[2], many, from, NULL};
        int status;
        pid_t child;
        snprintf(from, sizeof from, "%u", at);
        snprintf(many, sizeof many, "%u", first + count - at < FILTERED_ROUNDS ? first + count - at : FILTERED_ROUNDS);
        CHECK(posix_spawn(&child, self_path, NULL, NULL, of_part, environ) == 0 && waitpid(child, &status, 0) == child);
        if (status != 0)
            fprintf(stderr, "rounds from %u on: status %x\n", at, status);
        CHECK(status == 0);
    }
}

static void start_watch(void)
{
    pthread_t watchdog;
    sigset_t all, before;
    if (getenv("HOSTILE_PATIENCE"))
        patience = atoi(getenv("HOSTILE_PATIENCE"));
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    CHECK(pthread_create(&watchdog, NULL, watch, NULL) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
}

/* What a round has open at most, beside what is open between rounds. */
#define ROUND_DESCRIPTORS 48

int main(int count, char **words)
{
    if (count == 6 && strcmp(words[1], "errand") == 0)
        return errand_main(words);
    CHECK(count >= 4);
    ssize_t length = readlink("/proc/self/exe", self_path, sizeof self_path - 1);
    CHECK(length > 0);
    const char *surrounding = words[1];
    unsigned many = atoi(words[3]), first = count > 4 ? atoi(words[4]) : 0;
    if (strcmp(surrounding, "sandbox") == 0)
        return play_filtered(words, first, many), 0;
    make_pattern();
    sabotage = getenv("HOSTILE_SABOTAGE");
    may_close = strcmp(surrounding, "reading malloc") != 0;
    may_be_real_time = strcmp(surrounding, "real time") == 0;
    filters_at = strcmp(surrounding, "filtering") == 0 ? (int)(first + many / 2) : -1;
    start_watch();
    listener = listen_on(&listens, 0);
    peers_listener = listen_on(&peers_listen, 1);
    if (strcmp(surrounding, "few descriptors") == 0) {
        rlim_t most = open_descriptors() + ROUND_DESCRIPTORS;
        CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){most, most}) == 0);
    }
    last_round = first + many - 1;
    for (unsigned number = first; number < first + many; number++)
        play_round(strtoull(words[2], NULL, 10), number);
    return 0;
}

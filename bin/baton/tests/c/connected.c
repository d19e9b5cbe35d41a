/* connect(2), bind(2) and listen(2) of a socket that has a connection, again and again: they are refused at once, and the connection goes on.
 * Or of one that a set reports already. Usage: connected CASE [moved] */

#include "sockets.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>

#define ROUNDS 30
#define CALLS 1000
/* After so many exchanges of a line a rule for 64 KiB has handed a connection over. */
#define EXCHANGES 600

static struct pair both;
static struct sockaddr_in where;
static atomic_int is_over;

static void refuses(int fd)
{
    struct sockaddr_in any_port = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CHECK(bind(fd, (struct sockaddr *)&any_port, sizeof any_port) == -1 && errno == EINVAL);
    CHECK(listen(fd, 1) == -1 && errno == EINVAL);
}

static void *connect_beside(void *unused)
{
    while (!is_over) {
        CHECK(connect(both.client, (struct sockaddr *)&where, sizeof where) == -1 && errno == EISCONN);
        refuses(both.client);
    }
    return unused;
}

/* One thread connects the socket again and again while another one hands its connection over. */
static int beside(void)
{
    char line[] = "There is a line here, and one more, and so on, until there are a hundred and some characters of them in all.";
    for (int round = 0; round < ROUNDS; round++) {
        socklen_t length = sizeof where;
        pthread_t thread;
        both = connect_pair();
        CHECK(getpeername(both.client, (struct sockaddr *)&where, &length) == 0);
        is_over = 0;
        CHECK(pthread_create(&thread, NULL, connect_beside, NULL) == 0);
        for (int at = 0; at < EXCHANGES; at++) {
            exchange(both.client, both.server, line);
            exchange(both.server, both.client, line);
        }
        is_over = 1;
        CHECK(pthread_join(thread, NULL) == 0 && close(both.client) == 0 && close(both.server) == 0);
    }
    return 0;
}

/* The next edge of the one socket in a set. */
static unsigned edge(int set)
{
    struct epoll_event reported;
    CHECK(epoll_wait(set, &reported, 1, 20000) == 1);
    return reported.events;
}

/* A socket that a set has reported before it is connected: of its connection the set reports all the same. */
static int in_a_set(int moved)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0), server;
    CHECK(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    CHECK(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, client, &event) == 0 && edge(set) == (EPOLLOUT | EPOLLHUP));
    CHECK(connect(client, (struct sockaddr *)&address, length) == 0);
    CHECK((server = accept(listener, NULL, NULL)) >= 0);
    if (moved)
        until_on_nic(client);
    CHECK(edge(set) == EPOLLOUT);
    CHECK(shutdown(server, SHUT_WR) == 0);
    CHECK((edge(set) & (EPOLLIN | EPOLLRDHUP | EPOLLHUP)) == (EPOLLIN | EPOLLRDHUP));
    return 0;
}

/* A socket has a port of its own. When its peer has closed, and then it closes, the port is free for the next one at once. */
static int own_port(int moved)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, own = at;
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&at, length) == 0 && listen(listener, 16) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&at, &length) == 0);
    int free_port = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(free_port, (struct sockaddr *)&own, length) == 0);
    CHECK(getsockname(free_port, (struct sockaddr *)&own, &length) == 0 && close(free_port) == 0);
    for (int round = 0; round < 300; round++) {
        struct pair ends = {-1, socket(AF_INET, SOCK_STREAM, 0)};
        CHECK(bind(ends.client, (struct sockaddr *)&own, length) == 0);
        CHECK(connect(ends.client, (struct sockaddr *)&at, length) == 0);
        CHECK((ends.server = accept(listener, NULL, NULL)) >= 0);
        exchange(ends.client, ends.server, "there");
        exchange(ends.server, ends.client, "back");
        if (moved)
            until_on_nic(ends.client);
        CHECK(close(ends.server) == 0);
        CHECK(read(ends.client, &(char){0}, 1) == 0 && close(ends.client) == 0);
    }
    return 0;
}

int main(int count, char **arguments)
{
    alarm(STANDS_STILL);
    if (count >= 2 && strcmp(arguments[1], "own port") == 0)
        return own_port(count > 2);
    if (count >= 2 && strcmp(arguments[1], "in a set") == 0)
        return in_a_set(count > 2);
    if (count >= 2 && strcmp(arguments[1], "beside") == 0)
        return beside();
    struct pair ends = connect_pair();
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    CHECK(count >= 2 && strcmp(arguments[1], "again") == 0);
    exchange(ends.client, ends.server, "there");
    exchange(ends.server, ends.client, "back");
    if (count > 2)
        until_on_nic(ends.client);
    CHECK(getpeername(ends.client, (struct sockaddr *)&peer, &length) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (int call = 0; call < CALLS; call++) {
            CHECK(connect(ends.client, (struct sockaddr *)&peer, length) == -1 && errno == EISCONN);
            refuses(ends.client);
        }
        exchange(ends.client, ends.server, "there");
        exchange(ends.server, ends.client, "back");
    }
    /* Also when it has ended. */
    CHECK(shutdown(ends.server, SHUT_WR) == 0 && read(ends.client, &peer, 1) == 0);
    CHECK(shutdown(ends.client, SHUT_WR) == 0 && read(ends.server, &peer, 1) == 0);
    CHECK(connect(ends.client, (struct sockaddr *)&peer, length) == -1 && errno == EISCONN);
    return 0;
}

/* The C library's own input and output on connections, and copies of their descriptors. Usage: stdio CASE [moved]
 *
 * Prints nothing, and succeeds, if everything is as on any connection. */

#include "sockets.h"
#include <sys/epoll.h>

static struct pair ends;

/* A stream on the accepted end: both directions, then its end. */
static void stream(void)
{
    char line[100];
    FILE *file = fdopen(ends.server, "r+");
    CHECK(file);
    CHECK(write(ends.client, "one\ntwo\n", 8) == 8);
    CHECK(fgets(line, sizeof line, file) && strcmp(line, "one\n") == 0);
    CHECK(fgets(line, sizeof line, file) && strcmp(line, "two\n") == 0);
    CHECK(fprintf(file, "three\n") == 6 && fflush(file) == 0);
    CHECK(read(ends.client, line, sizeof line) == 6 && memcmp(line, "three\n", 6) == 0);
    CHECK(fclose(file) == 0);
    CHECK(read(ends.client, line, sizeof line) == 0);
}

/* Two streams, one for each direction, as servers that are written with stdio have them. */
static void streams(void)
{
    char line[100];
    FILE *in = fdopen(ends.server, "r"), *out = fdopen(dup(ends.server), "w");
    CHECK(in && out);
    CHECK(write(ends.client, "one\n", 4) == 4);
    CHECK(fgets(line, sizeof line, in) && strcmp(line, "one\n") == 0);
    CHECK(fputs("two\n", out) >= 0 && fflush(out) == 0);
    CHECK(read(ends.client, line, sizeof line) == 4 && memcmp(line, "two\n", 4) == 0);
    CHECK(fclose(in) == 0 && fclose(out) == 0);
    CHECK(read(ends.client, line, sizeof line) == 0);
}

/* A set keeps what was registered under a descriptor that is closed while another one of its socket is open. */
static void closed_number(void)
{
    int set = epoll_create1(0), copy;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 7}, got;
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, ends.server, &event) == 0);
    CHECK((copy = dup(ends.server)) >= 0);
    CHECK(close(ends.server) == 0);
    CHECK(write(ends.client, "one\n", 4) == 4);
    CHECK(epoll_wait(set, &got, 1, -1) == 1 && got.data.u64 == 7 && got.events == EPOLLIN);
    exchange(copy, ends.client, "two\n");
    CHECK(close(copy) == 0);
    CHECK(epoll_wait(set, &got, 1, 0) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count >= 2);
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"stream", stream}, {"streams", streams}, {"closed number", closed_number}};
    alarm(20);
    ends = connect_pair();
    exchange(ends.client, ends.server, "hello\n");
    exchange(ends.server, ends.client, "hello\n");
    if (count > 2)
        until_on_nic(ends.server);
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++)
        if (strcmp(cases[at].name, arguments[1]) == 0)
            return cases[at].run(), 0;
    return 2;
}

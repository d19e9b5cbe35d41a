/* Descriptors of a connection that are closed, or become others, while another thread makes calls on them. Usage: numbers CASE [moved]
 *
 * A call finds the connection, or what has taken its place, and nothing in between. */

#include "sockets.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#define ROUNDS 1000

static struct pair ends;
static _Atomic int number, calls, is_over;
static int stays, tombstone;

/* A call on the number, which changes nothing. Returns whether it has found the connection; anything but EBADF is wrong otherwise. */
static int finds_connection(int polls)
{
    char byte;
    if (polls) {
        struct pollfd entry = {number, POLLIN, 0};
        CHECK(poll(&entry, 1, 0) == 1);
        CHECK(entry.revents == POLLIN || entry.revents == POLLNVAL);
        return entry.revents == POLLIN;
    }
    ssize_t got = recv(number, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    CHECK(got == 1 ? byte == 'x' : errno == EBADF);
    return got == 1;
}

static void *use(void *unused)
{
    for (int round = 1; !is_over; round++) {
        while (!is_over && finds_connection(round % 2))
            calls++;
        CHECK(is_over || !stays);
        /* Until there is a number again. */
        for (int last = calls = -1; !is_over && calls == last;)
            sched_yield();
    }
    return unused;
}

/* The number is always the connection's. */
static void same(void)
{
    for (int round = 0; round < 10 * ROUNDS; round++)
        CHECK(dup2(ends.server, number) == number);
}

static void end_each(int closes)
{
    for (int round = 0; round < ROUNDS; round++) {
        while (calls <= 0)
            ;
        if (closes)
            CHECK(close(number) == 0);
        else
            CHECK(dup2(tombstone, number) == number);
        /* The other thread has found out. */
        while (calls >= 0)
            ;
        CHECK(closes ? dup(ends.server) == number : dup2(ends.server, number) == number);
        calls = 0;
    }
}

static void closed(void)
{
    end_each(1);
}

static void replaced(void)
{
    end_each(0);
}

static void *copy_back(void *copies)
{
    int *numbers = copies;
    for (int round = 0; round < 10 * ROUNDS; round++)
        CHECK(dup2(numbers[1], numbers[0]) == numbers[0]);
    return NULL;
}

/* Two threads, each of which puts the other one's descriptor in place of its own. */
static void exchanged(void)
{
    pthread_t other;
    int numbers[2] = {dup(ends.server), dup(ends.server)};
    CHECK(numbers[0] >= 0 && numbers[1] >= 0);
    CHECK(pthread_create(&other, NULL, copy_back, numbers) == 0);
    for (int round = 0; round < 10 * ROUNDS; round++)
        CHECK(dup2(numbers[0], numbers[1]) == numbers[1]);
    CHECK(pthread_join(other, NULL) == 0);
}

int main(int count, char **words)
{
    static const struct test_case cases[] = {{"same", same}, {"closed", closed}, {"replaced", replaced}, {"exchanged", exchanged}};
    pthread_t thread;
    alarm(STANDS_STILL);
    CHECK(count >= 2 && (tombstone = open("/dev/null", O_PATH | O_CLOEXEC)) >= 0);
    ends = connect_pair();
    CHECK(send(ends.client, "x", 1, 0) == 1);
    if (count > 2)
        until_on_nic(ends.server);
    struct pollfd entry = {ends.server, POLLIN, 0};
    CHECK(poll(&entry, 1, -1) == 1);
    CHECK((number = dup(ends.server)) >= 0);
    stays = strcmp(words[1], "same") == 0 || strcmp(words[1], "exchanged") == 0;
    CHECK(pthread_create(&thread, NULL, use, NULL) == 0);
    run_case(cases, sizeof cases / sizeof *cases, words[1]);
    is_over = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    return 0;
}

/* The C library's own input and output on connections, copies of their descriptors, and splice. Usage: stdio CASE [moved]
 *
 * Prints nothing, and succeeds, if everything is as on any connection. */

#include "sockets.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <time.h>

static struct pair ends;
static int moved;

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

static atomic_int sleeper;
static int sleeps_in_poll;

static void *sleep_on(void *unused)
{
    struct pollfd entry = {ends.server, POLLIN, 0};
    char byte;
    sleeper = syscall(SYS_gettid);
    CHECK(!sleeps_in_poll || (poll(&entry, 1, -1) == 1 && entry.revents == POLLIN));
    CHECK(recv(ends.server, &byte, 1, 0) == 1 && byte == 'x');
    return unused;
}

static void until_asleep(void)
{
    char path[64], line[512];
    ssize_t got;
    do {
        sched_yield();
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0 && (got = read(fd, line, sizeof line - 1)) > 0 && close(fd) == 0);
        line[got] = 0;
    } while (strrchr(line, ')')[2] != 'S');
}

/* A stream is made of a copy of the descriptor while another thread sleeps in a call on it: that sleeps on. */
static void beside(void)
{
    char line[10];
    pthread_t thread;
    FILE *file;
    sleeper = 0;
    CHECK(pthread_create(&thread, NULL, sleep_on, NULL) == 0);
    while (sleeper == 0)
        sched_yield();
    until_asleep();
    CHECK((file = fdopen(dup(ends.server), "w")) && fputs("two\n", file) >= 0 && fclose(file) == 0);
    CHECK(read(ends.client, line, sizeof line) == 4);
    CHECK(write(ends.client, "x", 1) == 1 && pthread_join(thread, NULL) == 0);
}

static void beside_poll(void)
{
    sleeps_in_poll = 1;
    beside();
}

/* What is unread of a connection of which both directions have ended, and its end. */
static void spliced_end(void)
{
    char line[10];
    int pipes[2];
    struct pollfd entry = {ends.server, POLLRDHUP, 0};
    CHECK(pipe(pipes) == 0 && write(ends.client, "one\n", 4) == 4 && shutdown(ends.client, SHUT_WR) == 0);
    CHECK(poll(&entry, 1, -1) == 1 && shutdown(ends.server, SHUT_WR) == 0);
    CHECK(read(ends.client, line, sizeof line) == 0 && close(ends.client) == 0);
    CHECK(splice(ends.server, NULL, pipes[1], NULL, 100, 0) == 4);
    CHECK(read(pipes[0], line, sizeof line) == 4 && memcmp(line, "one\n", 4) == 0);
    CHECK(splice(ends.server, NULL, pipes[1], NULL, 100, 0) == 0);
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

static void expect_at(int fd, const char *line)
{
    char got[100];
    size_t length = strlen(line), have = 0;
    while (have < length) {
        ssize_t more = read(fd, got + have, length - have);
        CHECK(more > 0);
        have += more;
    }
    CHECK(memcmp(got, line, length) == 0);
}

static int print_list(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    int printed = vdprintf(ends.server, format, list);
    va_end(list);
    return printed;
}

/* printf to a descriptor. */
static void print(void)
{
    CHECK(dprintf(ends.server, "%s %d %.1f\n", "one", 1, 1.5) == 10);
    expect_at(ends.client, "one 1 1.5\n");
    CHECK(print_list("%s %d %.1f\n", "two", 2, 2.5) == 10);
    expect_at(ends.client, "two 2 2.5\n");
    exchange(ends.client, ends.server, "three\n");
}

/* The connection becomes standard output, by dup2 or by its number being the lowest. */
static void output(void)
{
    CHECK(dup2(ends.server, 1) == 1);
    CHECK(puts("one") >= 0 && fflush(stdout) == 0);
    expect_at(ends.client, "one\n");
    CHECK(write(ends.server, "two\n", 4) == 4);
    expect_at(ends.client, "two\n");
    CHECK(close(0) == 0 && dup(ends.server) == 0 && close(1) == 0 && fcntl(ends.server, F_DUPFD, 0) == 1);
    CHECK(puts("three") >= 0 && fflush(stdout) == 0);
    expect_at(ends.client, "three\n");
}

/* The connection becomes standard input. */
static void input(void)
{
    char line[100];
    CHECK(dup2(ends.server, 0) == 0);
    CHECK(write(ends.client, "one\ntwo\n", 8) == 8);
    CHECK(fgets(line, sizeof line, stdin) && strcmp(line, "one\n") == 0);
    CHECK(fgets(line, sizeof line, stdin) && strcmp(line, "two\n") == 0);
}

/* A program of a super-server: its connection is standard input and output, which it reads and writes by system call and by stdio. */
static int serve(void)
{
    char line[100];
    for (;;) {
        ssize_t got = read(0, line, 6);
        if (got == 0)
            return 0;
        CHECK(got == 6 && write(1, line, got) == got);
        CHECK(fgets(line, sizeof line, stdin) && fputs(line, stdout) >= 0 && fflush(stdout) == 0);
    }
}

static void super_server(void)
{
    char *arguments[] = {"stdio", "serve", NULL};
    int status;
    pid_t child = fork();
    if (child == 0) {
        CHECK(dup2(ends.server, 0) == 0 && dup2(ends.server, 1) == 1);
        CHECK(close(ends.server) == 0 && close(ends.client) == 0);
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    CHECK(close(ends.server) == 0);
    for (int round = 0; round < 500; round++) {
        CHECK(write(ends.client, "round\n", 6) == 6);
        expect_at(ends.client, "round\n");
    }
    CHECK(shutdown(ends.client, SHUT_WR) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* splice, which finds nothing: the connection is in the kernel from then on. */
static void splice_nothing(int from, int pipe)
{
    CHECK(fcntl(from, F_SETFL, O_NONBLOCK) == 0);
    CHECK(splice(from, NULL, pipe, NULL, 1, 0) == -1 && errno == EAGAIN);
    while (is_on_nic(from))
        splice(from, NULL, pipe, NULL, 1, 0);
}

/* For two seconds, in which a connection that moves at random moves many times, none of these is on the NIC. */
static void stay(const int *fds, int count)
{
    for (time_t end = time(NULL) + 2; time(NULL) < end; nap())
        for (int at = 0; at < count; at++)
            CHECK(!is_on_nic(fds[at]));
}

/* The first moves of all wait until Baton's programs are attached to the devices. Meanwhile the connections are spliced. */
static void first_moves(void)
{
    enum { COUNT = 32 };
    int into[2], fds[COUNT];
    CHECK(pipe(into) == 0);
    for (int at = 0; at < COUNT; at++) {
        struct pair made = connect_pair();
        exchange(made.client, made.server, "it is to move\n");
        fds[at] = made.server;
        if (at >= COUNT / 2)
            splice_nothing(fds[at - COUNT / 2], into[1]);
    }
    for (int at = COUNT / 2; at < COUNT; at++)
        splice_nothing(fds[at], into[1]);
    stay(fds, COUNT);
}

/* A spliced connection stays in the kernel also after a child of vfork has inherited it. */
static void spliced_and_vfork(void)
{
    int into[2];
    CHECK(pipe(into) == 0);
    splice_nothing(ends.server, into[1]);
    pid_t child = vfork();
    if (child == 0)
        _exit(0);
    CHECK(child > 0 && waitpid(child, NULL, 0) == child);
    stay(&ends.server, 1);
}

static atomic_int written, is_over;

static void *print_on(void *unused)
{
    for (; !is_over; written++)
        CHECK(fputs("x", stdout) >= 0);
    return unused;
}

/* One connection after another becomes standard output, on which another thread prints all the time. */
static void output_beside(void)
{
    int nowhere = open("/dev/null", O_WRONLY);
    pthread_t printer;
    CHECK(nowhere >= 0 && dup2(nowhere, 1) == 1 && setvbuf(stdout, NULL, _IONBF, 0) == 0);
    CHECK(pthread_create(&printer, NULL, print_on, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        struct pair pair = connect_pair();
        exchange(pair.client, pair.server, "there\n");
        exchange(pair.server, pair.client, "back\n");
        if (moved)
            until_on_nic(pair.server);
        CHECK(dup2(pair.server, 1) == 1);
        for (int before = written; written < before + 10;)
            sched_yield();
        CHECK(dup2(nowhere, 1) == 1);
        for (int before = written; written < before + 2;)
            sched_yield();
        CHECK(close(pair.server) == 0 && close(pair.client) == 0);
    }
    is_over = 1;
    CHECK(pthread_join(printer, NULL) == 0);
}

int main(int count, char **arguments)
{
    CHECK(count >= 2);
    moved = count > 2;
    static const struct test_case cases[] = {{"stream", stream}, {"streams", streams}, {"spliced end", spliced_end}, {"vfork", spliced_and_vfork}, {"beside recv", beside}, {"beside poll", beside_poll}, {"closed number", closed_number}, {"print", print}, {"output", output}, {"output beside", output_beside}, {"input", input}, {"super-server", super_server}};
    alarm(STANDS_STILL);
    if (strcmp(arguments[1], "serve") == 0)
        return serve();
    if (strcmp(arguments[1], "first moves") == 0)
        return first_moves(), 0;
    ends = connect_used(count > 2);
    return run_case(cases, sizeof cases / sizeof *cases, arguments[1]);
}

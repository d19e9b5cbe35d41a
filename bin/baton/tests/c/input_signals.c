/* Signals for input (O_ASYNC), asked for in every way. Usage: input_signals CASE [moved] */

#include "sockets.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>

static struct pair ends;
static volatile sig_atomic_t seen, seen_fd;

static void count(int signal, siginfo_t *info, void *context)
{
    (void)context;
    seen_fd = info->si_fd;
    seen = signal;
}

/* The peer sends, and the signal comes. */
static void comes(int signal)
{
    char byte;
    seen = seen_fd = 0;
    CHECK(write(ends.client, "x", 1) == 1);
    while (!seen)
        sched_yield();
    CHECK(seen == signal);
    CHECK(read(ends.server, &byte, 1) == 1 && byte == 'x');
}

static void set_flag(int on)
{
    int flags = fcntl(ends.server, F_GETFL);
    CHECK(flags >= 0 && fcntl(ends.server, F_SETFL, on ? flags | O_ASYNC : flags & ~O_ASYNC) == 0);
    CHECK(!!(fcntl(ends.server, F_GETFL) & O_ASYNC) == on);
}

static void by_ioctl(int on)
{
    CHECK(ioctl(ends.server, FIOASYNC, &on) == 0 && !!(fcntl(ends.server, F_GETFL) & O_ASYNC) == on);
}

int main(int count_of, char **words)
{
    alarm(STANDS_STILL);
    CHECK(count_of > 1);
    struct sigaction action = {.sa_sigaction = count, .sa_flags = SA_SIGINFO | SA_RESTART};
    CHECK(sigaction(SIGIO, &action, NULL) == 0 && sigaction(SIGRTMIN + 1, &action, NULL) == 0);
    CHECK(sigaction(SIGURG, &action, NULL) == 0);
    ends = connect_used(count_of > 2);
    int own = getpid();
    if (strcmp(words[1], "fcntl") == 0) {
        CHECK(fcntl(ends.server, F_SETOWN, own) == 0);
        set_flag(1);
        comes(SIGIO);
        comes(SIGIO);
    } else if (strcmp(words[1], "thread") == 0) {
        struct f_owner_ex thread = {.type = F_OWNER_TID, .pid = syscall(SYS_gettid)};
        CHECK(fcntl(ends.server, F_SETOWN_EX, &thread) == 0 && fcntl(ends.server, F_SETSIG, SIGRTMIN + 1) == 0);
        set_flag(1);
        comes(SIGRTMIN + 1);
        CHECK(seen_fd == ends.server);
        CHECK(fcntl(ends.server, F_SETSIG, 0) == 0);
        comes(SIGIO);
    } else if (strcmp(words[1], "ioctl") == 0) {
        CHECK(ioctl(ends.server, FIOSETOWN, &own) == 0);
        by_ioctl(1);
        comes(SIGIO);
        by_ioctl(0);
        by_ioctl(1);
        comes(SIGIO);
    } else if (strcmp(words[1], "group") == 0) {
        CHECK(setpgid(0, 0) == 0);
        own = -getpid();
        CHECK(ioctl(ends.server, SIOCSPGRP, &own) == 0);
        by_ioctl(1);
        comes(SIGIO);
    } else {
        /* Urgent data raises SIGURG without O_ASYNC. */
        char byte;
        CHECK(strcmp(words[1], "urgent") == 0 && fcntl(ends.server, F_SETOWN, own) == 0);
        CHECK(send(ends.client, "!", 1, MSG_OOB) == 1);
        while (!seen)
            sched_yield();
        CHECK(seen == SIGURG && recv(ends.server, &byte, 1, MSG_OOB) == 1 && byte == '!');
    }
    return 0;
}

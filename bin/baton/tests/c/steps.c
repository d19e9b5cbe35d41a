/* A signal at each single instruction of a call on a socket. Usage: steps CASE [moved]
 *
 * A thread is traced step by step (the trap flag) until it has made so many steps; there a signal arrives, whose handler ends the thread
 * ("exit"), leaves the call by siglongjmp ("jump"), or makes calls itself ("call"). Nothing is left of a call, and its connection works. */

#include "ends.h"
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/param.h>

#define TRAP_FLAG 0x100

static int call_of_thread;
static const char *what;
/* Steps that the traced thread has made in its call, after how many the signal comes, and whether it has come. */
static volatile long steps, at;
static volatile sig_atomic_t is_in_call, came;
static atomic_int cleaned;
static __thread sigjmp_buf back;

/* The call that waits if there is nothing to receive. */
#define WAITS CALLS_AT_ONCE

static void run_in(int call)
{
    if (call == WAITS)
        recv(ends.server, some, 100, 0);
    else
        call_at_once(call);
}

static void set_trap_flag(void)
{
    __asm__ volatile("sub $128, %%rsp; pushfq; orq %0, (%%rsp); popfq; add $128, %%rsp" ::"i"(TRAP_FLAG) : "memory", "cc");
}

static void clear_trap_flag(void)
{
    __asm__ volatile("sub $128, %%rsp; pushfq; andq %0, (%%rsp); popfq; add $128, %%rsp" ::"i"(~TRAP_FLAG) : "memory", "cc");
}

/* The C library's functions might be what is traced. */
static long system_call(long number, long first, long second, long third)
{
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third) : "rcx", "r11", "memory");
    return result;
}

/* Blocks SIGUSR1 while it runs, which therefore comes at the instruction that is next. */
static void step(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)info;
    if (is_in_call && ++steps == at) {
        ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
        came = 1;
        system_call(SYS_tgkill, system_call(SYS_getpid, 0, 0, 0), system_call(SYS_gettid, 0, 0, 0), SIGUSR1);
    }
}

static void act(int signal)
{
    (void)signal;
    if (what[0] == 'e')
        pthread_exit((void *)7);
    if (what[0] == 'j')
        siglongjmp(back, 1);
    struct pollfd entry = {ends.server, POLLIN, 0};
    poll(&entry, 1, 0);
    recv(ends.server, some, 100, MSG_DONTWAIT | MSG_PEEK);
}

static void clean(void *unused)
{
    (void)unused;
    cleaned++;
}

static void *work(void *unused)
{
    pthread_cleanup_push(clean, NULL);
    /* The thread's first call prepares more than the others. */
    run_in(0);
    if (sigsetjmp(back, 1) == 0) {
        set_trap_flag();
        is_in_call = 1;
        run_in(call_of_thread);
        is_in_call = 0;
        clear_trap_flag();
    }
    pthread_cleanup_pop(0);
    return unused;
}

static void *end_early(void *unused)
{
    (void)unused;
    pthread_exit(NULL);
}

/* Functions are looked up at their first call, which nothing may leave. */
static void look_up(int call)
{
    pthread_t made;
    CHECK(pthread_create(&made, NULL, end_early, NULL) == 0 && pthread_join(made, NULL) == 0);
    CHECK(send(ends.client, some, 1, 0) == 1);
    run_in(call);
    while (recv(ends.server, some, sizeof some, MSG_DONTWAIT) > 0)
        ;
}

/* Makes the call, with a signal after `at` steps. Returns whether it came. */
static int play_once(int call)
{
    pthread_t made;
    void *result;
    cleaned = came = is_in_call = 0;
    steps = 0;
    /* A call that would wait has something to receive. */
    if (call == WAITS)
        CHECK(send(ends.client, some, 1, 0) == 1);
    CHECK(pthread_create(&made, NULL, work, NULL) == 0 && pthread_join(made, &result) == 0);
    int ended = came && what[0] == 'e';
    CHECK(result == (ended ? (void *)7 : NULL) && cleaned == ended);
    while (recv(ends.server, some, sizeof some, MSG_DONTWAIT) > 0)
        ;
    return came;
}

/* The steps at which a call begins and ends, and some of those in between, since each is reached one by one. */
static void play(int call)
{
    open_ends();
    look_up(call);
    call_of_thread = call;
    at = LONG_MAX;
    CHECK(!play_once(call) && steps > 0);
    long all = steps, between = all / 8 + 1, most = all < 500 ? 30 : 12;
    for (at = 1; play_once(call); at += at < most || at > all - most ? 1 : MIN(between, MAX(all - most - at, 1)))
        ;
    close_ends(0);
}

int main(int number, char **arguments)
{
    struct sigaction traced = {.sa_sigaction = step, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigaction action = {.sa_handler = act, .sa_flags = SA_RESTART};
    int before = 0;
    CHECK(number >= 2);
    alarm(100);
    may_move = number > 2;
    what = arguments[1];
    sigaddset(&traced.sa_mask, SIGUSR1);
    CHECK(sigaction(SIGTRAP, &traced, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    /* The first one may wait, for which the library keeps a descriptor. */
    for (int call = WAITS; call >= 0; call--) {
        play(call);
        int now = count_descriptors();
        CHECK(call == WAITS || now == before);
        before = now;
    }
    return 0;
}

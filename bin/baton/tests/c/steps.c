/* Signals that arrive at chosen instructions of a call on a socket. Usage: steps CASE [moved]
 *
 * A thread single-steps through the call (the processor's trap flag). After a number of steps SIGUSR1 arrives, whose handler ends the thread
 * ("exit"), leaves the call by siglongjmp ("jump"), or makes calls itself ("call"). Afterwards the connection works and no descriptor is
 * leaked.
 *
 * A quarter of these instructions is played, drawn from BATON_FUZZ_SEED (1); all if BATON_EVERY_CASE is set. */

#include "ends.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

#define TRAP_FLAG 0x100

static int call_of_thread;
static const char *what;
/* Instructions that the thread has executed in its call; the one at which the signal is sent; whether it has been sent. */
static volatile long steps, at;
static volatile sig_atomic_t is_in_call, came;
static atomic_int cleaned;
static __thread sigjmp_buf back;
/* Whether all instructions are played; and the last random number. */
static int every;
static unsigned long long drawn;

/* The call that blocks if there is nothing to receive. */
#define WAITS CALLS_AT_ONCE
/* One with a variable number of arguments, which executes nothing. */
#define EXECUTES (WAITS + 1)

static void run_in(int call)
{
    if (call == WAITS)
        recv(ends.server, some, 100, 0);
    else if (call == EXECUTES)
        execl("/nowhere/at/all", "all", (char *)NULL);
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

/* Makes a system call without the C library, whose syscall() the preloaded library intercepts. */
static long system_call(long number, long first, long second, long third)
{
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second), "d"(third) : "rcx", "r11", "memory");
    return result;
}

/* Handler of SIGTRAP. It blocks SIGUSR1, which is therefore delivered when it returns: at the instruction that comes next. */
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
    /* The first call of a thread also sets up its malloc cache. */
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

/* Calls each function once: the dynamic linker binds it then, which no handler may leave. */
static void look_up(int call)
{
    pthread_t made;
    CHECK(pthread_create(&made, NULL, end_early, NULL) == 0 && pthread_join(made, NULL) == 0);
    CHECK(send(ends.client, some, 1, 0) == 1);
    run_in(call);
    while (recv(ends.server, some, sizeof some, MSG_DONTWAIT) > 0)
        ;
}

/* Makes the call in a thread of its own, with a signal after `at` steps. Returns whether the call was long enough for that. */
static int play_once(int call)
{
    pthread_t made;
    void *result;
    cleaned = came = is_in_call = 0;
    steps = 0;
    /* The call that would block has something to receive. */
    if (call == WAITS)
        CHECK(send(ends.client, some, 1, 0) == 1);
    CHECK(pthread_create(&made, NULL, work, NULL) == 0 && pthread_join(made, &result) == 0);
    int ended = came && what[0] == 'e';
    CHECK(result == (ended ? (void *)7 : NULL) && cleaned == ended);
    while (recv(ends.server, some, sizeof some, MSG_DONTWAIT) > 0)
        ;
    return came;
}

/* How many instructions on the next signal comes: `usual`, or in a sample four times as many on average. */
static long apart(long usual)
{
    if (every)
        return usual;
    drawn = drawn * 6364136223846793005ULL + 1442695040888963407ULL;
    return 1 + (long)((drawn >> 33) % (unsigned long long)(8 * usual - 1));
}

/* Plays the first and last instructions of a call and some eight in between, or a sample of them: each step costs an exception. */
static void play(int call)
{
    open_ends();
    if (call == EXECUTES)
        /* Nothing of the connection is a child's: it stays where it is. */
        CHECK(fcntl(ends.server, F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends.client, F_SETFD, FD_CLOEXEC) == 0);
    look_up(call);
    call_of_thread = call;
    at = LONG_MAX;
    CHECK(!play_once(call) && steps > 0);
    long all = steps, between = all / 8 + 1, most = all < 500 ? 30 : 12;
    at = apart(1);
    while (play_once(call)) {
        /* Instructions up to the last ones. */
        long left = all - most - at;
        long next = at < most || left < 0 ? apart(1) : apart(between);
        at += at < most || left < 0 || next < left ? next : left + apart(1);
    }
    close_ends(0);
}

int main(int number, char **arguments)
{
    struct sigaction traced = {.sa_sigaction = step, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigaction action = {.sa_handler = act, .sa_flags = SA_RESTART};
    int before = 0;
    const char *seed = getenv("BATON_FUZZ_SEED");
    CHECK(number >= 2);
    /* If all are played, it steps through a million instructions: some tens of seconds alone, minutes beside others. */
    alarm(400);
    may_move = number > 2;
    what = arguments[1];
    every = getenv("BATON_EVERY_CASE") != NULL;
    /* Each case has a sample of its own. */
    drawn = strtoull(seed ? seed : "1", NULL, 10) ^ ((unsigned long long)what[0] << 32);
    sigaddset(&traced.sa_mask, SIGUSR1);
    CHECK(sigaction(SIGTRAP, &traced, NULL) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    /* The blocking call comes first: from then on the library keeps an eventfd for threads that sleep. */
    for (int call = WAITS; call >= 0; call--) {
        play(call);
        int now = count_descriptors();
        CHECK(call == WAITS || now == before);
        before = now;
    }
    play(EXECUTES);
    CHECK(count_descriptors() == before);
    return 0;
}

/* Signal handlers that make calls on sockets, and what programs see of their actions. Usage: handlers CASE [moved]
 *
 * A timer and another thread send signals a thousand times a second to threads that make the same calls. */

#include "sockets.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <time.h>

#define THREADS 3
#define SIGNALS 400

static struct sockaddr_in address = {.sin_family = AF_INET};
static socklen_t length = sizeof address;
static int listener, may_move;

static void open_listener(void)
{
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 64) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
}

/* A timer that sends a signal to this thread a thousand times a second. */
static timer_t begin_timer(int signal)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = signal};
    struct itimerspec every = {.it_interval.tv_nsec = 1000000, .it_value.tv_nsec = 1000000};
    timer_t timer;
    event._sigev_un._tid = syscall(SYS_gettid);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &every, NULL) == 0);
    return timer;
}

static void handle(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    CHECK(sigaction(signal, &action, NULL) == 0);
}

/* A thread's connections: one that its main flow and its handler both use, and one of the handler's own. */
struct worker {
    pthread_t thread;
    struct pair both, own;
    int set;
    atomic_ulong sent, got, signals;
    atomic_int busy;
};

static struct worker workers[THREADS];
static __thread struct worker *self;
static atomic_int running;

/* What can be received without waiting. */
static void drain(struct worker *worker, int fd)
{
    char buffer[256];
    ssize_t got;
    while ((got = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0)
        worker->got += got;
    CHECK(got < 0 && (errno == EAGAIN || errno == EINTR));
}

static void put(struct worker *worker, int fd)
{
    ssize_t sent = send(fd, "12345678", 8, MSG_DONTWAIT | MSG_NOSIGNAL);
    CHECK(sent > 0 || errno == EAGAIN || errno == EINTR);
    worker->sent += sent > 0 ? sent : 0;
}

static void make_calls(struct worker *worker)
{
    struct pollfd entries[] = {{worker->both.server, POLLIN, 0}, {worker->own.client, POLLIN | POLLOUT, 0}};
    struct epoll_event event = {.events = EPOLLIN, .data.fd = worker->own.server};
    struct timeval none = {0, 0};
    fd_set set;
    int waiting = -1, made = socket(AF_INET, SOCK_STREAM, 0), copy = dup(worker->own.client);
    CHECK(made >= 0 && copy >= 0);
    CHECK(poll(entries, 2, 0) >= 0 || errno == EINTR);
    FD_ZERO(&set);
    FD_SET(worker->both.server, &set);
    CHECK(select(worker->both.server + 1, &set, NULL, NULL, &none) >= 0 || errno == EINTR);
    CHECK(ioctl(worker->both.server, FIONREAD, &waiting) == 0 && waiting >= 0);
    CHECK(epoll_ctl(worker->set, EPOLL_CTL_ADD, copy, &event) == 0);
    CHECK(epoll_wait(worker->set, &event, 1, 0) >= 0 || errno == EINTR);
    put(worker, worker->own.client);
    put(worker, worker->both.client);
    drain(worker, worker->own.server);
    drain(worker, worker->both.server);
    CHECK(accept(listener, NULL, NULL) == -1 && (errno == EAGAIN || errno == EINTR));
    CHECK(epoll_ctl(worker->set, EPOLL_CTL_DEL, copy, NULL) == 0);
    CHECK(close(copy) == 0 && close(made) == 0);
}

static void call_in_handler(int signal)
{
    int before = errno;
    (void)signal;
    self->signals++;
    make_calls(self);
    errno = before;
}

static int only_allocates;

/* Most of what handlers interrupt is in malloc and free. */
static void allocate(void)
{
    static __thread void *some[64];
    static __thread unsigned turn;
    for (int at = 0; at < 64; at++) {
        free(some[at]);
        turn = turn * 1103515245 + 12345;
        CHECK((some[at] = malloc((turn >> 16) % (at % 8 == 0 ? 200000 : 2000))) != NULL);
    }
}

static void *work(void *argument)
{
    timer_t timer;
    sigset_t usual;
    self = argument;
    sigemptyset(&usual);
    CHECK(pthread_sigmask(SIG_SETMASK, &usual, NULL) == 0);
    timer = begin_timer(SIGUSR1);
    while (self->signals < SIGNALS && only_allocates)
        allocate();
    while (self->signals < SIGNALS) {
        void *some = malloc(self->signals % 5000);
        make_calls(self);
        free(some);
    }
    timer_delete(timer);
    running--;
    while (running > 0)
        sched_yield();
    return NULL;
}

static void *disturb(void *unused)
{
    while (running > 0) {
        for (int at = 0; at < THREADS; at++)
            pthread_kill(workers[at].thread, SIGUSR2);
        /* Waits: between two rounds of signals, so that the threads get on. */
        usleep(1000);
    }
    return unused;
}

static void use_calls(void)
{
    sigset_t both;
    pthread_t other;
    CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
    handle(SIGUSR1, call_in_handler, SA_RESTART);
    handle(SIGUSR2, call_in_handler, SA_NODEFER);
    sigemptyset(&both);
    sigaddset(&both, SIGUSR2);
    CHECK(pthread_sigmask(SIG_BLOCK, &both, NULL) == 0);
    running = THREADS;
    for (int at = 0; at < THREADS; at++) {
        struct worker *worker = &workers[at];
        worker->both = connect_pair();
        worker->own = connect_pair();
        CHECK((worker->set = epoll_create1(0)) >= 0);
        if (may_move)
            exchange_until_on_nic(worker->both, worker->both.server);
    }
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_create(&workers[at].thread, NULL, work, &workers[at]) == 0);
    CHECK(pthread_create(&other, NULL, disturb, NULL) == 0);
    for (int at = 0; at < THREADS; at++)
        CHECK(pthread_join(workers[at].thread, NULL) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    for (int at = 0; at < THREADS; at++) {
        struct worker *worker = &workers[at];
        char last;
        CHECK(shutdown(worker->both.client, SHUT_WR) == 0 && shutdown(worker->own.client, SHUT_WR) == 0);
        while (recv(worker->both.server, &last, 1, 0) == 1)
            worker->got++;
        while (recv(worker->own.server, &last, 1, 0) == 1)
            worker->got++;
        CHECK(worker->got == worker->sent);
    }
}

/* Actions are what the program has set, and its handlers get what they ask for. */

static volatile sig_atomic_t seen, nested, depth;
static volatile int code, value, sender, blocks_itself, blocks[2];
static char other_stack[1 << 16];
static volatile int on_other_stack;

static void note(int signal, siginfo_t *info, void *context)
{
    char here;
    sigset_t during;
    CHECK(signal == info->si_signo && context != NULL);
    code = info->si_code;
    value = info->si_value.sival_int;
    sender = info->si_pid;
    seen++;
    on_other_stack = &here >= other_stack && &here < other_stack + sizeof other_stack;
    pthread_sigmask(SIG_SETMASK, NULL, &during);
    blocks_itself = sigismember(&during, signal);
    blocks[0] = sigismember(&during, SIGUSR1);
    blocks[1] = sigismember(&during, SIGUSR2);
}

static void plain(int signal)
{
    (void)signal;
    seen++;
}

static void nest(int signal)
{
    depth++;
    nested = depth > nested ? depth : nested;
    if (depth == 1)
        raise(signal);
    depth--;
}

/* Older functions are among those that it calls. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* A bad pointer ends the program: the C library reads and writes actions itself. */
static void use_bad_action(int signal, const struct sigaction *new, struct sigaction *old)
{
    int status;
    if (fork() == 0) {
        sigaction(signal, new, old);
        _exit(0);
    }
    CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

static void use_actions(void)
{
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO | SA_RESTART}, old;
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    int queued = SIGRTMIN + 3, status;
    sigaddset(&action.sa_mask, SIGUSR2);
    CHECK(sigaction(queued, &action, &old) == 0 && old.sa_handler == SIG_DFL);
    CHECK(sigaction(queued, NULL, &old) == 0 && old.sa_sigaction == note);
    CHECK((old.sa_flags & ~0x04000000) == (SA_SIGINFO | SA_RESTART) && sigismember(&old.sa_mask, SIGUSR2) == 1 && sigismember(&old.sa_mask, SIGUSR1) == 0);
    CHECK(sigqueue(getpid(), queued, (union sigval){.sival_int = 41}) == 0 && seen == 1);
    CHECK(code == SI_QUEUE && value == 41 && sender == getpid());
    CHECK(blocks_itself && !blocks[0] && blocks[1] && !on_other_stack);
    CHECK(sigaltstack(&stack, NULL) == 0);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    CHECK(sigaction(queued, &action, &old) == 0 && (old.sa_flags & SA_RESTART));
    CHECK(sigqueue(getpid(), queued, (union sigval){.sival_int = 42}) == 0 && seen == 2 && on_other_stack);
    CHECK(value == 42 && !blocks_itself);
    /* Once. */
    CHECK(signal(SIGUSR1, plain) == SIG_DFL && sigaction(SIGUSR1, NULL, &old) == 0);
    CHECK(old.sa_handler == plain && (old.sa_flags & ~0x04000000) == SA_RESTART && sigismember(&old.sa_mask, SIGUSR1) == 1);
    CHECK(raise(SIGUSR1) == 0 && seen == 3);
    action = (struct sigaction){.sa_handler = plain, .sa_flags = SA_RESETHAND};
    CHECK(sigaction(SIGUSR1, &action, &old) == 0 && old.sa_handler == plain);
    CHECK(raise(SIGUSR1) == 0 && seen == 4 && sigaction(SIGUSR1, NULL, &old) == 0 && old.sa_handler == SIG_DFL);
    if (fork() == 0) {
        raise(SIGUSR1);
        _exit(0);
    }
    CHECK(wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR1);
    /* Of itself. */
    handle(SIGUSR1, nest, SA_NODEFER);
    CHECK(raise(SIGUSR1) == 0 && nested == 2 && depth == 0);
    /* Older functions. */
    CHECK(siginterrupt(SIGUSR1, 0) == 0 && sigaction(SIGUSR1, NULL, &old) == 0 && old.sa_handler == nest && (old.sa_flags & SA_RESTART));
    CHECK(siginterrupt(SIGUSR1, 1) == 0 && signal(SIGUSR1, plain) == nest);
    CHECK(sigaction(SIGUSR1, NULL, &old) == 0 && old.sa_handler == plain && !(old.sa_flags & SA_RESTART));
    CHECK(sigset(SIGUSR1, nest) == plain && sigset(SIGUSR1, SIG_HOLD) == nest && sigset(SIGUSR1, plain) == SIG_HOLD);
    CHECK(raise(SIGUSR1) == 0 && seen == 5 && sigignore(SIGUSR1) == 0 && signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    CHECK(sysv_signal(SIGUSR1, plain) == SIG_DFL && raise(SIGUSR1) == 0 && seen == 6 && signal(SIGUSR1, SIG_IGN) == SIG_DFL);
    CHECK(sigaction(0, NULL, &old) == -1 && errno == EINVAL && sigaction(SIGKILL, &action, NULL) == -1 && errno == EINVAL);
    struct sigaction *bad = (struct sigaction *)8;
    for (int at = 0; at < 2; at++) {
        use_bad_action(at ? SIGSEGV : SIGUSR1, bad, NULL);
        use_bad_action(at ? SIGSEGV : SIGUSR1, &action, bad);
    }
    /* A handler is none after exec. */
    handle(SIGUSR2, plain, 0);
    if (fork() == 0)
        execl("/proc/self/exe", "handlers", "default?", NULL);
    CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    exchange(workers[0].both.client, workers[0].both.server, "on\n");
}

/* Real-time signals are handled once each, in their order, also where the queue is full. */

#define QUEUED 1000

static pthread_t receiver;
static volatile sig_atomic_t next_value, disordered;
static int to_thread;
static atomic_int all_sent;

static void note_value(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    disordered |= info->si_code != SI_QUEUE || info->si_value.sival_int != next_value || context == NULL;
    next_value++;
}

static void note_value_and_call(int signal, siginfo_t *info, void *context)
{
    int before = errno;
    note_value(signal, info, context);
    make_calls(self);
    errno = before;
}

static void *send_values(void *unused)
{
    for (int value = 0; value < QUEUED;) {
        union sigval described = {.sival_int = value};
        int failed = to_thread ? pthread_sigqueue(receiver, SIGRTMIN + 1, described)
                               : sigqueue(getpid(), SIGRTMIN + 1, described) ? errno : 0;
        CHECK(failed == 0 || failed == EAGAIN);
        value += !failed;
    }
    all_sent = 1;
    return unused;
}

static void receive_values(int flags, int calls)
{
    struct sigaction action = {.sa_sigaction = calls ? note_value_and_call : note_value, .sa_flags = SA_SIGINFO | SA_RESTART | flags};
    sigset_t queued;
    pthread_t sender;
    receiver = pthread_self();
    next_value = all_sent = 0;
    sigemptyset(&queued);
    sigaddset(&queued, SIGRTMIN + 1);
    CHECK(sigaction(SIGRTMIN + 1, &action, NULL) == 0 && pthread_sigmask(SIG_BLOCK, &queued, NULL) == 0);
    CHECK(pthread_create(&sender, NULL, send_values, NULL) == 0 && pthread_sigmask(SIG_UNBLOCK, &queued, NULL) == 0);
    while (!all_sent)
        make_calls(self);
    CHECK(pthread_join(sender, NULL) == 0);
    make_calls(self);
    CHECK(next_value == QUEUED && !disordered);
}

/* The limit is one for all processes of a user: so of one that has no other ones, where there may be one. */
static void allow_few_queued(void)
{
    char line[200];
    int waiting = -1;
    CHECK(setuid(100000 + getpid()) == 0 || errno == EINVAL);
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status);
    while (fgets(line, sizeof line, status))
        sscanf(line, "SigQ: %d", &waiting);
    fclose(status);
    CHECK(waiting >= 0 && setrlimit(RLIMIT_SIGPENDING, &(struct rlimit){waiting + 4, waiting + 4}) == 0);
}

static void use_queue(void)
{
    static char other[1 << 16];
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
    CHECK(fcntl(listener, F_SETFL, O_NONBLOCK) == 0 && sigaltstack(&stack, NULL) == 0);
    self = &workers[0];
    self->own = connect_pair();
    CHECK((self->set = epoll_create1(0)) >= 0);
    while (may_move && !is_on_nic(self->both.server))
        exchange(self->both.client, self->both.server, "hello\n");
    to_thread = 1;
    receive_values(0, 0);
    receive_values(SA_ONSTACK, 0);
    to_thread = 0;
    allow_few_queued();
    receive_values(0, 1);
    receive_values(SA_ONSTACK, 1);
}

/* An action that a system call of the program's own has shown, given back by the C library's function. */
static void use_shown_action(void)
{
    struct { void *handler; unsigned long flags; void *restorer; unsigned long mask; } shown;
    struct sigaction back = {0};
    handle(SIGUSR1, plain, 0);
    CHECK(syscall(SYS_rt_sigaction, SIGUSR1, NULL, &shown, sizeof shown.mask) == 0);
    back.sa_handler = (void (*)(int))shown.handler;
    CHECK(sigaction(SIGUSR1, &back, NULL) == 0 && sigaction(SIGUSR1, NULL, &back) == 0 && back.sa_handler == plain);
    seen = 0;
    CHECK(raise(SIGUSR1) == 0 && seen == 1);
}

int main(int number, char **arguments)
{
    struct sigaction now;
    const char *name = arguments[1];
    CHECK(number >= 2);
    CHECK(sigaction(SIGUSR2, NULL, &now) == 0);
    if (strcmp(name, "default?") == 0)
        return now.sa_handler == SIG_DFL ? 5 : 6;
    may_move = number > 2;
    alarm(STANDS_STILL);
    open_listener();
    only_allocates = strcmp(name, "allocates") == 0;
    if (only_allocates || strcmp(name, "calls") == 0)
        return use_calls(), 0;
    workers[0].both = connect_pair();
    if (strcmp(name, "actions") == 0)
        return use_actions(), use_shown_action(), 0;
    if (strcmp(name, "queue") == 0)
        return use_queue(), 0;
    return 2;
}

/* Processes that share connections, or start others. Usage: processes CASE [moved]
 *
 * With "moved" the connections are on the NIC before a case begins. Prints nothing, and succeeds, if everything is as natively. */

#include "sockets.h"
#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/un.h>
#include <sys/wait.h>

#define TOTAL (2 << 20)

extern char **environ;
static struct pair ends;
static int moved;

static void ended_well(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status))
        fprintf(stderr, "the child ended by signal %d\n", WTERMSIG(status));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static unsigned char byte_at(size_t at)
{
    return at % 251;
}

/* Receives a stream until it has all bytes. */
static void receive_all(int fd)
{
    unsigned char piece[8192];
    for (size_t have = 0; have < TOTAL;) {
        ssize_t got = read(fd, piece, sizeof piece);
        CHECK(got > 0);
        for (ssize_t at = 0; at < got; at++)
            CHECK(piece[at] == byte_at(have + at));
        have += got;
    }
}

static void send_all(int fd)
{
    unsigned char piece[8192];
    for (size_t have = 0; have < TOTAL;) {
        for (size_t at = 0; at < sizeof piece; at++)
            piece[at] = byte_at(have + at);
        ssize_t sent = write(fd, piece, TOTAL - have < sizeof piece ? TOTAL - have : sizeof piece);
        CHECK(sent > 0);
        have += sent;
    }
}

/* The peer: sends back what it receives. */
static void *echo(void *unused)
{
    unsigned char piece[8192];
    for (size_t have = 0; have < TOTAL;) {
        ssize_t got = read(ends.client, piece, sizeof piece), sent = 0;
        CHECK(got > 0);
        for (have += got; sent < got;) {
            ssize_t more = write(ends.client, piece + sent, got - sent);
            CHECK(more > 0);
            sent += more;
        }
    }
    return unused;
}

static int reader(void *unused)
{
    receive_all(ends.server);
    _exit(unused != NULL);
}

/* A child receives on a connection while its parent sends on it. */
static void share(pid_t (*start)(void))
{
    pthread_t peer;
    pid_t child = start();
    CHECK(pthread_create(&peer, NULL, echo, NULL) == 0);
    send_all(ends.server);
    ended_well(child);
    CHECK(pthread_join(peer, NULL) == 0);
}

static pid_t by_fork(void)
{
    pid_t child = fork();
    return child == 0 ? reader(NULL) : child;
}

static pid_t by_fork_alone(void)
{
    pid_t (*function)(void) = _Fork;
    pid_t child = function();
    return child == 0 ? reader(NULL) : child;
}

static pid_t by_clone(void)
{
    static char stack[1 << 18] __attribute__((aligned(16)));
    return clone(reader, stack + sizeof stack, SIGCHLD, NULL);
}

static pid_t by_raw_fork(void)
{
    pid_t child = syscall(SYS_fork);
    return child == 0 ? reader(NULL) : child;
}

static char *reader_arguments(char *number)
{
    sprintf(number, "%d", ends.server);
    return number;
}

static pid_t by_spawn(void)
{
    char number[16], *arguments[] = {"processes", "reader", reader_arguments(number), NULL};
    pid_t child;
    CHECK(posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
    return child;
}

/* Starts a program with these file actions, which alone pass connections on. */
static pid_t spawn_by(posix_spawn_file_actions_t *actions, const char *path, char **arguments)
{
    pid_t child;
    CHECK(fcntl(ends.server, F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends.client, F_SETFD, FD_CLOEXEC) == 0);
    CHECK(posix_spawn(&child, path, actions, NULL, arguments, environ) == 0);
    CHECK(posix_spawn_file_actions_destroy(actions) == 0);
    return child;
}

static pid_t by_spawn_with_actions(void)
{
    char *arguments[] = {"processes", "reader", "200", NULL};
    posix_spawn_file_actions_t actions;
    CHECK(posix_spawn_file_actions_init(&actions) == 0 && posix_spawn_file_actions_adddup2(&actions, ends.server, 200) == 0);
    return spawn_by(&actions, "/proc/self/exe", arguments);
}

/* What a started program does not get stays where it is. */
static void spawn_beside(void)
{
    char *arguments[] = {"true", NULL};
    for (int round = 0; round < 5; round++) {
        posix_spawn_file_actions_t actions;
        int output[2];
        CHECK(pipe(output) == 0 && posix_spawn_file_actions_init(&actions) == 0);
        CHECK(posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO) == 0);
        pid_t child = spawn_by(&actions, "/bin/true", arguments);
        CHECK(!moved || is_on_nic(ends.server));
        ended_well(child);
        CHECK(close(output[0]) == 0 && close(output[1]) == 0);
    }
    exchange(ends.client, ends.server, "after\n");
    exchange(ends.server, ends.client, "all\n");
}

static pid_t by_vfork(void)
{
    char number[16], *arguments[] = {"processes", "reader", reader_arguments(number), NULL};
    pid_t child = vfork();
    if (child == 0) {
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    return child;
}

static pid_t by_exec(void)
{
    char number[16], *arguments[] = {"processes", "reader", reader_arguments(number), NULL};
    pid_t child = fork();
    if (child == 0) {
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    return child;
}

static char command[500];

static void *run_command(void *unused)
{
    CHECK(system(command) == 0);
    return unused;
}

/* The path of this program. */
static const char *own_path(void)
{
    static char self[400];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(length > 0);
    self[length] = 0;
    return self;
}

/* The command that receives all. */
static void prepare_command(void)
{
    snprintf(command, sizeof command, "%s reader %d", own_path(), ends.server);
}

/* As `share`, with a command of the shell's. */
static void by_system(void)
{
    pthread_t peer, shell;
    prepare_command();
    CHECK(pthread_create(&shell, NULL, run_command, NULL) == 0);
    CHECK(pthread_create(&peer, NULL, echo, NULL) == 0);
    send_all(ends.server);
    CHECK(pthread_join(shell, NULL) == 0 && pthread_join(peer, NULL) == 0);
}

/* As `share`, with a program that a shell starts. */
static void by_popen(void)
{
    pthread_t peer;
    prepare_command();
    FILE *child = popen(command, "r");
    CHECK(child && pthread_create(&peer, NULL, echo, NULL) == 0);
    send_all(ends.server);
    CHECK(pclose(child) == 0 && pthread_join(peer, NULL) == 0);
}

/* Answers a line, each time it is the first one. */
static int holder(int fd)
{
    char line[6];
    while (recv(fd, line, sizeof line, MSG_WAITALL) == sizeof line && memcmp(line, "first\n", sizeof line) == 0)
        CHECK(send(fd, "answer\n", 7, 0) == 7);
    return memcmp(line, "ended\n", sizeof line);
}

static void ask_holder(void)
{
    char line[7];
    CHECK(send(ends.client, "first\n", 6, 0) == 6);
    CHECK(recv(ends.client, line, sizeof line, MSG_WAITALL) == sizeof line && memcmp(line, "answer\n", sizeof line) == 0);
}

/* A program that a shell has started keeps the connection, which this process closes: it ends with that program, and not before. */
static void is_outlived(const char *path)
{
    pthread_t shell;
    char byte;
    snprintf(command, sizeof command, "%s holder %d", path, ends.server);
    CHECK(pthread_create(&shell, NULL, run_command, NULL) == 0);
    ask_holder();
    CHECK(close(ends.server) == 0);
    ask_holder();
    CHECK(recv(ends.client, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    CHECK(send(ends.client, "ended\n", 6, 0) == 6);
    CHECK(recv(ends.client, &byte, 1, 0) == 0);
    CHECK(pthread_join(shell, NULL) == 0);
}

static void is_outlived_by_system(void)
{
    is_outlived(own_path());
}

/* One that becomes another user when it is executed: no library is loaded into it. */
static void is_outlived_by_setuid(void)
{
    static char copy[450];
    char line[2000];
    snprintf(copy, sizeof copy, "%s/other", getenv("TMPDIR"));
    snprintf(line, sizeof line, "cp %s %s && chown 65534 %s && chmod 4755 %s", own_path(), copy, copy, copy);
    CHECK(system(line) == 0);
    while (moved && !is_on_nic(ends.server))
        exchange(ends.client, ends.server, "once more\n");
    is_outlived(copy);
}

/* While a command of the shell's has the connection, its descriptor gets FD_CLOEXEC, so that the next one would not get it. When the
 * command has ended, it moves again nevertheless. */
static void is_kept_to_itself_meanwhile(void)
{
    pthread_t shell;
    snprintf(command, sizeof command, "%s holder %d", own_path(), ends.server);
    CHECK(pthread_create(&shell, NULL, run_command, NULL) == 0);
    ask_holder();
    CHECK(fcntl(ends.server, F_SETFD, FD_CLOEXEC) == 0);
    CHECK(send(ends.client, "ended\n", 6, 0) == 6);
    CHECK(pthread_join(shell, NULL) == 0);
    if (moved)
        exchange_until_on_nic(ends, ends.server);
    exchange(ends.client, ends.server, "after\n");
    exchange(ends.server, ends.client, "all\n");
}

/* Its connections stay in the kernel for good. */
static void never_moves(void)
{
    struct pair pair = connect_pair();
    for (int round = 0; round < 4000; round++) {
        exchange(pair.client, pair.server, "there\n");
        exchange(pair.server, pair.client, "and back\n");
        CHECK(!is_on_nic(pair.client) && !is_on_nic(pair.server));
    }
    close(pair.client);
    close(pair.server);
}

static void fork_and_go_on(void (*child_does)(void))
{
    pid_t child = fork();
    if (child == 0) {
        if (child_does)
            child_does();
        _exit(0);
    }
    ended_well(child);
    never_moves();
}

static void use_io_uring(void)
{
    /* A thread of the kernel's polls it. */
    struct io_uring_params parameters = {.flags = IORING_SETUP_SQPOLL};
    CHECK(syscall(SYS_io_uring_setup, 1, &parameters) >= 0);
    fork_and_go_on(never_moves);
}

static void confine(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0);
    fork_and_go_on(never_moves);
}

static void fork_raw(void)
{
    pid_t child = syscall(SYS_fork);
    if (child == 0)
        _exit(0);
    ended_well(child);
    fork_and_go_on(NULL);
}

/* A child uses connections of its own. */
static void use_connections(void)
{
    struct pair pair = connect_pair();
    for (int round = 0; round < 3; round++) {
        exchange(pair.client, pair.server, "there\n");
        exchange(pair.server, pair.client, "and back\n");
    }
    close(pair.client);
    close(pair.server);
}

static int handles;

/* Handlers of forks, as of a library that is begun before all others: they use a connection, and make and close others. */
static void at_fork(void)
{
    if (!handles)
        return;
    exchange(ends.client, ends.server, "at a\n");
    exchange(ends.server, ends.client, "fork\n");
    use_connections();
}

static void register_handlers(void)
{
    pthread_atfork(at_fork, at_fork, NULL);
}

__attribute__((section(".preinit_array"), used)) static void (*const before_all_others)(void) = register_handlers;

/* Takes the alarm if the thread that forks stands still: that one may block all signals. */
static void *stand_by(void *unused)
{
    pause();
    return unused;
}

/* The first child lives until the last fork is done: the connection is in the kernel, and the agent's, at further forks. */
static void fork_with_handlers(void)
{
    enum { CHILDREN = 3 };
    pthread_t other;
    pid_t children[CHILDREN];
    int end[2];
    CHECK(pthread_create(&other, NULL, stand_by, NULL) == 0 && pipe(end) == 0);
    handles = 1;
    for (int at = 0; at < CHILDREN; at++)
        if ((children[at] = fork()) == 0) {
            char byte;
            close(end[1]);
            _exit(read(end[0], &byte, 1) != 0);
        }
    close(end[1]);
    for (int at = 0; at < CHILDREN; at++)
        ended_well(children[at]);
}

static void *open_session(void *unused)
{
    use_connections();
    return unused;
}

/* Another thread asks for a session, of a Baton that does not answer, while this one forks. Its socket is the program's second argument. */
static void fork_while_opening(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    pthread_t opener;
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0), agent = -1;
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 16) == 0);
    CHECK(pthread_create(&opener, NULL, open_session, NULL) == 0);
    if (getenv("BATON_RUN"))
        CHECK((agent = accept(listener, NULL, NULL)) >= 0);
    pid_t child = fork();
    if (child == 0) {
        use_connections();
        _exit(0);
    }
    ended_well(child);
    CHECK(pthread_join(opener, NULL) == 0);
    close(agent);
}

static atomic_int over;

/* Makes and closes sockets, and sleeps on one: each takes what the library keeps for its next use, and returns it. */
static void *churn(void *unused)
{
    while (!over) {
        close(socket(AF_INET, SOCK_STREAM, 0));
        close(epoll_create1(0));
    }
    return unused;
}

/* A child finds what the library keeps free, whatever other threads have done at the fork. */
static void fork_while_churning(void)
{
    pthread_t threads[3];
    for (int at = 0; at < 3; at++)
        CHECK(pthread_create(&threads[at], NULL, churn, NULL) == 0);
    for (int round = 0; round < 300; round++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(STANDS_STILL);
            close(socket(AF_INET, SOCK_STREAM, 0));
            close(epoll_create1(0));
            _exit(0);
        }
        ended_well(child);
    }
    over = 1;
    for (int at = 0; at < 3; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
}

/* Makes connections, waits for what is sent on them, and closes them: each round takes every lock of the library's, as connections move. */
static void *serve(void *unused)
{
    while (!over) {
        struct pair pair = connect_pair();
        for (int round = 0; round < 4; round++) {
            struct pollfd watched = {.fd = pair.server, .events = POLLIN};
            CHECK(write(pair.client, "line\n", 5) == 5);
            CHECK(poll(&watched, 1, -1) == 1);
            CHECK(read(pair.server, (char[5]){0}, 5) == 5);
            exchange(pair.server, pair.client, "back\n");
        }
        close(pair.client);
        close(pair.server);
    }
    return unused;
}

/* Children are forked while other threads make, use and close connections. One half of them use connections of their own, the other half
 * close what they have inherited. */
static void fork_while_serving(pid_t (*start)(void))
{
    pthread_t threads[3];
    alarm(STANDS_STILL);
    for (int at = 0; at < 3; at++)
        CHECK(pthread_create(&threads[at], NULL, serve, NULL) == 0);
    for (int round = 0; round < 300; round++) {
        pid_t child = start();
        if (child == 0) {
            alarm(STANDS_STILL);
            if (round % 2)
                use_connections();
            else
                close(ends.client);
            _exit(close(ends.server) != 0);
        }
        ended_well(child);
    }
    over = 1;
    for (int at = 0; at < 3; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    exchange(ends.client, ends.server, "after\n");
    exchange(ends.server, ends.client, "all\n");
}

static pid_t fork_alone(void)
{
    return ((pid_t (*)(void))_Fork)();
}

static void serve_and_fork(void)
{
    fork_while_serving(fork);
}

static void serve_and_fork_alone(void)
{
    fork_while_serving(fork_alone);
}

/* As fork(2), by instructions of the program's own, which no library sees. */
static pid_t fork_unseen(void)
{
    long child;
    __asm__ volatile("syscall" : "=a"(child) : "a"(SYS_clone), "D"(SIGCHLD), "S"(0L), "d"(0L) : "rcx", "r11", "memory");
    return child;
}

/* A child that nobody saw sends and receives on its parent's connections: what was reported to it as done is done, and the parent's own bytes are
 * whole. */
static void share_unseen(void)
{
    for (int round = 0; round < 20; round++) {
        CHECK(write(ends.server, "for the child\n", 14) == 14);
        pid_t child = fork_unseen();
        if (child == 0) {
            char line[14];
            int done = write(ends.client, "child\n", 6) == 6;
            done |= recv(ends.client, line, sizeof line, MSG_DONTWAIT) > 0 ? 2 : 0;
            _exit(done);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK(write(ends.client, "parent\n", 7) == 7);
        const char *all = WEXITSTATUS(status) & 1 ? "child\nparent\n" : "parent\n";
        char got[20];
        CHECK(recv(ends.server, got, strlen(all), MSG_WAITALL) == (ssize_t)strlen(all));
        CHECK(memcmp(got, all, strlen(all)) == 0);
        if (!(WEXITSTATUS(status) & 2)) {
            CHECK(recv(ends.client, got, 14, MSG_WAITALL) == 14 && memcmp(got, "for the child\n", 14) == 0);
        }
        exchange(ends.server, ends.client, "next\n");
    }
}

static void serve_and_fork_unseen(void)
{
    fork_while_serving(fork_unseen);
}

/* Number of this process's eventfds. */
static int eventfds(void)
{
    char path[300], what[40];
    int found = 0;
    DIR *all = opendir("/proc/self/fd");
    CHECK(all);
    for (struct dirent *entry; (entry = readdir(all));) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t length = readlink(path, what, sizeof what);
        found += length == 20 && memcmp(what, "anon_inode:[eventfd]", 20) == 0;
    }
    closedir(all);
    return found;
}

static void *receive_line(void *unused)
{
    char line[10];
    CHECK(read(ends.server, line, sizeof line) == 5);
    return unused;
}

/* What wakes the parent's threads is not the child's. (The program itself makes no eventfd.) */
static void share_no_eventfds(void)
{
    pthread_t sleeper;
    int set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN}, got;
    CHECK(epoll_ctl(set, EPOLL_CTL_ADD, ends.client, &event) == 0);
    CHECK(pthread_create(&sleeper, NULL, receive_line, NULL) == 0);
    CHECK(write(ends.client, "line\n", 5) == 5);
    CHECK(pthread_join(sleeper, NULL) == 0);
    CHECK(write(ends.server, "line\n", 5) == 5);
    CHECK(epoll_wait(set, &got, 1, -1) == 1);
    pid_t child = fork();
    if (child == 0)
        _exit(eventfds());
    ended_well(child);
}

int main(int count, char **arguments)
{
    CHECK(count >= 2);
    const char *name = arguments[1];
    alarm(STANDS_STILL);
    if (strcmp(name, "reader") == 0)
        return receive_all(atoi(arguments[2])), 0;
    if (strcmp(name, "holder") == 0)
        return holder(atoi(arguments[2]));
    if (strcmp(name, "opening") == 0)
        return fork_while_opening(arguments[2]), 0;
    moved = count > 2;
    static const struct {
        const char *name;
        pid_t (*start)(void);
    } ways[] = {{"fork", by_fork}, {"_Fork", by_fork_alone}, {"clone", by_clone}, {"raw fork", by_raw_fork}, {"spawn", by_spawn}, {"spawn, with actions", by_spawn_with_actions}, {"vfork", by_vfork}, {"exec", by_exec}};
    static const struct {
        const char *name;
        void (*run)(void);
    } others[] = {{"spawn, beside", spawn_beside}, {"popen", by_popen}, {"system", by_system}, {"kept, system", is_kept_to_itself_meanwhile}, {"outlived, system", is_outlived_by_system}, {"outlived, setuid", is_outlived_by_setuid}, {"io_uring for good", use_io_uring}, {"seccomp for good", confine}, {"raw fork for good", fork_raw}, {"churn", fork_while_churning}, {"handlers", fork_with_handlers}, {"serve", serve_and_fork}, {"serve, _Fork", serve_and_fork_alone}, {"serve, unseen", serve_and_fork_unseen}, {"unseen", share_unseen}, {"eventfds", share_no_eventfds}};
    ends = connect_pair();
    exchange(ends.client, ends.server, "hello\n");
    exchange(ends.server, ends.client, "hello\n");
    if (moved)
        until_on_nic(ends.server);
    for (size_t at = 0; at < sizeof ways / sizeof *ways; at++)
        if (strcmp(ways[at].name, name) == 0)
            return share(ways[at].start), 0;
    for (size_t at = 0; at < sizeof others / sizeof *others; at++)
        if (strcmp(others[at].name, name) == 0)
            return others[at].run(), 0;
    return 2;
}

/* What a child of vfork does with descriptors before it executes a program, and a process that executes another one. Usage: vforks CASE [moved|kernel [ADDRESS]]
 *
 * With "moved" the connection is on the NIC before each round. ADDRESS is this host's, for datagrams. Prints nothing, and succeeds, if everything is as natively. */

#include "sockets.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define ROUNDS 100

static struct pair ends;
static char self[400];
static const char *local = "127.0.0.1";

static void ends_well(pid_t child)
{
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Becomes this program, which does nothing or reads a line from standard input. */
static void execute(const char *what)
{
    char *arguments[] = {"vforks", (char *)what, NULL};
    execv(self, arguments);
    _exit(127);
}

/* Another file gets the connection's number. */
static void file_instead(void)
{
    char text[8];
    close(ends.server);
    int file = open(self, O_RDONLY | O_CLOEXEC);
    if (file != ends.server || read(file, text, 4) != 4 || memcmp(text, "\177ELF", 4) != 0)
        _exit(1);
    if (lseek(file, 0, SEEK_CUR) != 4 || fcntl(file, F_GETFL) & O_NONBLOCK)
        _exit(2);
    execute("nothing");
}

static void file_in_place(void)
{
    char text[8];
    int file = open(self, O_RDONLY | O_CLOEXEC);
    if (dup2(file, ends.server) != ends.server || read(ends.server, text, 4) != 4 || memcmp(text, "\177ELF", 4) != 0)
        _exit(1);
    execute("nothing");
}

static void pipe_instead(void)
{
    int pipes[2];
    char text[8];
    close(ends.server);
    if (pipe(pipes) != 0 || write(pipes[1], "piped\n", 6) != 6 || read(pipes[0], text, 8) != 6)
        _exit(1);
    execute("nothing");
}

static void socket_instead(void)
{
    close(ends.server);
    int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made != ends.server || recv(made, self, 0, 0) != -1 || errno != ENOTCONN)
        _exit(1);
    execute("nothing");
}

static void close_all(void)
{
    close_range(3, ~0u, 0);
    execute("nothing");
}

static void pass_on(void)
{
    if (dup2(ends.server, 0) != 0)
        _exit(1);
    close_range(3, ~0u, 0);
    execute("line");
}

/* The connection's number has been closed before its copy becomes the standard input. */
static void pass_on_copy(void)
{
    int copy = fcntl(ends.server, F_DUPFD_CLOEXEC, 50);
    close(ends.server);
    if (dup2(copy, 0) != 0)
        _exit(1);
    close_range(3, ~0u, 0);
    execute("line");
}

static void use(void)
{
    char line[8];
    _exit(recv(ends.server, line, 7, MSG_WAITALL) != 7 || write(ends.server, "child\n", 6) != 6);
}

static void go(void (*child_does)(void))
{
    pid_t child = vfork();
    if (child == 0)
        child_does();
    ends_well(child);
}

static void go_on_nic(int moved)
{
    if (moved)
        exchange_until_on_nic(ends, ends.server);
}

/* What the child does is its own matter: unread bytes stay, and the connection works. */
static void beside(void (*child_does)(void), int moved)
{
    for (int round = 0; round < ROUNDS; round++) {
        char line[8];
        if (round % 20 == 0)
            go_on_nic(moved);
        CHECK(send(ends.client, "unread\n", 7, 0) == 7);
        go(close_all);
        go(child_does);
        CHECK(recv(ends.server, line, 7, MSG_WAITALL) == 7 && memcmp(line, "unread\n", 7) == 0);
        exchange(ends.server, ends.client, "and back\n");
    }
    /* A socket of the child's own with the same number is taken for the connection: that is restored until the child has ended. */
    if (moved && child_does == socket_instead)
        go_on_nic(moved);
    CHECK(!moved || is_on_nic(ends.server));
}

/* The program that the child executes, or the child, reads what is unread. */
static void instead(void (*child_does)(void), int moved)
{
    for (int round = 0; round < ROUNDS / 4; round++) {
        if (round % 4 == 0)
            go_on_nic(moved);
        CHECK(send(ends.client, "unread\n", 7, 0) == 7);
        go(close_all);
        go(child_does);
        if (child_does == use) {
            char line[8];
            CHECK(recv(ends.client, line, 6, MSG_WAITALL) == 6 && memcmp(line, "child\n", 6) == 0);
        }
        exchange(ends.server, ends.client, "and back\n");
    }
}

/* A process answers lines, leaves one unread, and executes itself, which goes on: it is the same process, whose last program the agent may
 * not know to be gone yet. */
static int again(int fd, int left, int moved)
{
    char line[8], number[2][16];
    for (int at = 0; at < 300 || (moved && !is_on_nic(fd)); at++)
        CHECK(recv(fd, line, 7, MSG_WAITALL) == 7 && memcmp(line, "unread\n", 7) == 0 && send(fd, "answer\n", 7, 0) == 7);
    if (left == 0)
        return 0;
    sprintf(number[0], "%d", fd);
    sprintf(number[1], "%d", left - 1);
    char *arguments[] = {"vforks", "again", number[0], number[1], moved ? "moved" : NULL, NULL};
    execv(self, arguments);
    return 1;
}

static void execute_again(void (*unused)(void), int moved)
{
    char line[8];
    (void)unused;
    CHECK(fcntl(ends.server, F_SETFD, 0) == 0);
    /* What the kernel has to copy, and the new program's start, take so long that the agent could act meanwhile. */
    static char large[120000];
    memset(large, 'x', sizeof large - 1);
    for (char name[] = "LARGE_A"; name[6] <= 'L'; name[6]++)
        CHECK(setenv(name, large, 1) == 0);
    pid_t child = fork();
    if (child == 0)
        _exit(close(ends.client) || again(ends.server, 20, moved));
    close(ends.server);
    do {
        CHECK(send(ends.client, "unread\n", 7, MSG_NOSIGNAL) == 7 || errno == EPIPE || errno == ECONNRESET);
    } while (recv(ends.client, line, 7, MSG_WAITALL) == 7);
    ends_well(child);
}

/* The child that is about to be killed, and the lock without which it is not reaped: its number is no other process's before that. */
static volatile pid_t victim;
static pthread_mutex_t reaping = PTHREAD_MUTEX_INITIALIZER;

static void *kill_children(void *unused)
{
    (void)unused;
    for (unsigned round = 0;; round++) {
        CHECK(pthread_mutex_lock(&reaping) == 0);
        if (victim != 0) {
            /* Waits: for different moments of what the child does. */
            nanosleep(&(struct timespec){.tv_nsec = round * 7919 % 3000 * 1000}, NULL);
            kill(victim, SIGKILL);
            victim = 0;
        }
        CHECK(pthread_mutex_unlock(&reaping) == 0);
        sched_yield();
    }
}

/* Children use sockets, duplicate and close them, and are killed meanwhile: nothing of their parent's stays locked. */
static void kill_each(void (*unused)(void), int moved)
{
    (void)unused;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(local)};
    socklen_t length = sizeof address;
    char text[8];
    pthread_t killer;
    CHECK(pthread_create(&killer, NULL, kill_children, NULL) == 0);
    for (int round = 0; round < 2 * ROUNDS; round++) {
        static int datagrams;
        siginfo_t ended;
        if (round % 10 == 0) {
            go_on_nic(moved);
            CHECK((datagrams = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) >= 0);
            CHECK(bind(datagrams, (struct sockaddr *)&address, length) == 0);
            CHECK(getsockname(datagrams, (struct sockaddr *)&address, &length) == 0);
            CHECK(connect(datagrams, (struct sockaddr *)&address, length) == 0);
        }
        CHECK(send(datagrams, "unread", 6, 0) == 6);
        pid_t child = vfork();
        if (child == 0) {
            victim = getpid();
            for (;;) {
                recv(datagrams, text, 0, MSG_DONTWAIT | MSG_PEEK);
                dup2(datagrams, 50);
                dup2(ends.server, 51);
                close(50);
                close_range(50, 60, 0);
            }
        }
        CHECK(child > 0 && waitid(P_PID, child, &ended, WEXITED | WNOWAIT) == 0);
        CHECK(pthread_mutex_lock(&reaping) == 0);
        victim = 0;
        CHECK(pthread_mutex_unlock(&reaping) == 0);
        CHECK(waitpid(child, NULL, 0) == child && ended.si_code == CLD_KILLED);
        CHECK(recv(datagrams, text, 8, 0) == 6 && memcmp(text, "unread", 6) == 0);
        exchange(ends.client, ends.server, "and on\n");
        if (round % 10 == 9) {
            close(datagrams);
            address.sin_port = 0;
        }
    }
}

static int read_line(void)
{
    char line[8];
    return recv(0, line, 7, MSG_WAITALL) != 7 || memcmp(line, "unread\n", 7) != 0;
}

int main(int count, char **arguments)
{
    CHECK(count >= 2);
    const char *name = arguments[1];
    int moved = count > 2 && strcmp(arguments[2], "moved") == 0;
    alarm(STANDS_STILL);
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    if (strcmp(name, "nothing") == 0)
        return 0;
    if (strcmp(name, "line") == 0)
        return read_line();
    if (strcmp(name, "again") == 0)
        return again(atoi(arguments[2]), atoi(arguments[3]), count > 4);
    static const struct {
        const char *name;
        void (*child_does)(void);
        void (*run)(void (*child_does)(void), int moved);
    } cases[] = {{"file", file_instead, beside}, {"file in place", file_in_place, beside}, {"pipe", pipe_instead, beside}, {"socket", socket_instead, beside}, {"pass on", pass_on, instead}, {"pass on a copy", pass_on_copy, instead}, {"use", use, instead}, {"exec", NULL, execute_again}, {"killed", NULL, kill_each}};
    if (count > 3)
        local = arguments[3];
    ends = connect_pair();
    CHECK(fcntl(ends.server, F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends.client, F_SETFD, FD_CLOEXEC) == 0);
    /* The number of a descriptor that is closed is the lowest that is free. */
    CHECK(open("/dev/null", O_RDONLY | O_CLOEXEC) < ends.server);
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++)
        if (strcmp(cases[at].name, name) == 0)
            return cases[at].run(cases[at].child_does, moved), 0;
    return 2;
}

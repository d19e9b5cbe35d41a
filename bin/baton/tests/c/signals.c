/* A client that asks and waits in recv(2), on a blocking socket, while a timer expires and children end, each with a handler that has
   SA_RESTART: no call may fail. The last byte of a question is sent at the timer's second expiry, so each wait is interrupted. Usage: signals PORT. It
   ends so many seconds after it has read their number from standard input. Prints the numbers of rounds, expiries and children. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t alarms, children, until_last, failed;
static int fd;
static char last;

static void on_alarm(int signal) {
    (void)signal;
    int before = errno;
    alarms++;
    if (until_last > 0 && --until_last == 0 && send(fd, &last, 1, 0) != 1) failed = 1;
    errno = before;
}

static void on_child(int signal) {
    (void)signal;
    int before = errno;
    while (waitpid(-1, NULL, WNOHANG) > 0) children++;
    errno = before;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void handle(int signal, void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    if (sigaction(signal, &action, NULL) != 0) fail("sigaction");
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) fail("connect");
    handle(SIGALRM, on_alarm);
    handle(SIGCHLD, on_child);
    struct itimerval every = {.it_interval = {.tv_usec = 3000}, .it_value = {.tv_usec = 3000}};
    if (setitimer(ITIMER_REAL, &every, NULL) != 0) fail("setitimer");
    time_t end = 0;
    unsigned long rounds = 0;
    static char asked[65536], got[65536];
    for (; end == 0 || time(NULL) < end; rounds++) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        if (end == 0 && poll(&input, 1, 0) == 1) {
            char line[16] = "";
            if (read(0, line, sizeof line - 1) <= 0) fail("no number of seconds");
            end = time(NULL) + atoi(line);
        }
        /* A child that ends while its parent waits. */
        pid_t child = fork();
        if (child < 0) fail("fork");
        if (child == 0) {
            close(fd);
            /* Waits: so that its parent usually waits by then; if not, the result is the same. */
            usleep(1000);
            _exit(0);
        }
        size_t length = 1 + rounds * 7919 % sizeof asked;
        memset(asked, (int)rounds, length);
        for (size_t sent = 0; sent < length - 1;) {
            ssize_t done = send(fd, asked + sent, length - 1 - sent, 0);
            if (done <= 0) fail("send");
            sent += done;
        }
        last = asked[length - 1];
        until_last = 2;
        for (size_t have = 0; have < length;) {
            ssize_t done = recv(fd, got + have, length - have, 0);
            if (done <= 0) fail("recv");
            have += done;
        }
        if (failed) fail("send in a handler");
        if (memcmp(asked, got, length) != 0) {
            fputs("other bytes\n", stderr);
            return 1;
        }
    }
    printf("%lu %d %d\n", rounds, (int)alarms, (int)children);
    return 0;
}

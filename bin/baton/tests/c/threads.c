/* A server with a thread for each connection, and few descriptors. Usage: threads few [moved]
 *
 * The client is a process of its own. Each end has as many descriptors as it needs natively, and 40 more. */

#include "sockets.h"
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define CONNECTIONS 200
#define ROUNDS 5

static struct sockaddr_in address = {.sin_family = AF_INET};
static socklen_t length = sizeof address;

static void *serve(void *connection)
{
    int fd = (long)connection;
    char line[5];
    ssize_t got;
    while ((got = recv(fd, line, sizeof line, MSG_WAITALL)) == sizeof line)
        CHECK(send(fd, line, sizeof line, 0) == sizeof line);
    CHECK(got == 0);
    return NULL;
}

static void *client(void *unused)
{
    static int ends[CONNECTIONS];
    char line[5];
    for (int at = 0; at < CONNECTIONS; at++) {
        CHECK((ends[at] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
        CHECK(connect(ends[at], (struct sockaddr *)&address, length) == 0);
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int at = 0; at < CONNECTIONS; at++)
            CHECK(send(ends[at], "line\n", 5, 0) == 5);
        for (int at = 0; at < CONNECTIONS; at++)
            CHECK(recv(ends[at], line, sizeof line, MSG_WAITALL) == sizeof line && memcmp(line, "line\n", 5) == 0);
    }
    return unused;
}

int main(void)
{
    struct rlimit few = {CONNECTIONS + 43, CONNECTIONS + 43};
    pthread_t threads[CONNECTIONS];
    pthread_attr_t small;
    int status;
    alarm(STANDS_STILL);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, CONNECTIONS) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    pid_t child = fork();
    if (child == 0) {
        client(NULL);
        _exit(0);
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 1 << 16) == 0);
    for (int at = 0; at < CONNECTIONS; at++) {
        long fd = accept(listener, NULL, NULL);
        CHECK(fd >= 0);
        CHECK(pthread_create(&threads[at], &small, serve, (void *)fd) == 0);
    }
    for (int at = 0; at < CONNECTIONS; at++)
        CHECK(pthread_join(threads[at], NULL) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}

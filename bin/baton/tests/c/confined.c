/* Confines itself like a server does before it serves: listens, changes its root directory to DIRECTORY (which is empty), and its user to
 * UID if that is given, and only then has its first connection, with itself. Echoes over that until its standard input ends, and compares.
 *
 *     confined DIRECTORY [UID]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void check(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void pass(int from, int to, char *piece, size_t length) {
    check(send(from, piece, length, 0) == (ssize_t)length, "send");
    memset(piece, 0, length);
    check(recv(to, piece, length, MSG_WAITALL) == (ssize_t)length, "recv");
}

int main(int count, char **arguments) {
    check(count == 2 || count == 3, "arguments");
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    check(listener >= 0 && bind(listener, (struct sockaddr *)&name, length) == 0 && listen(listener, 4) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&name, &length) == 0, "getsockname");
    check(chroot(arguments[1]) == 0 && chdir("/") == 0, "chroot");
    if (count == 3) {
        check(setuid((uid_t)atoi(arguments[2])) == 0, "setuid");
        check(setuid(0) != 0, "this user may still be root");
    }
    check(access("/proc/self", F_OK) != 0, "the root directory is not empty");
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(client >= 0 && connect(client, (struct sockaddr *)&name, length) == 0, "connect");
    int server = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    check(server >= 0, "accept");
    unsigned long rounds = 0;
    /* Until the end of the standard input. */
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    for (; poll(&input, 1, 0) == 0; rounds++) {
        char piece[4000], expected[sizeof piece];
        for (size_t at = 0; at < sizeof piece; at++) expected[at] = (char)(at * 31 + rounds);
        memcpy(piece, expected, sizeof piece);
        pass(client, server, piece, sizeof piece);
        pass(server, client, piece, sizeof piece);
        check(memcmp(piece, expected, sizeof piece) == 0, "wrong bytes");
    }
    // Each is counted then.
    close(client);
    close(server);
    printf("%lu\n", rounds);
    return 0;
}

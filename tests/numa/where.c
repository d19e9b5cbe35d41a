/* Where a server's connections are processed: for each its processor
 * (SO_INCOMING_CPU) and that processor's node, as the program reads them.
 *
 *   where serve PORT COUNT
 *   where visit ADDRESS PORT COUNT COMMAND   runs COMMAND while all are open */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 64
#define ROUNDS 300

static void check(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static int node_of(int cpu)
{
    char path[64];
    int node = -1;
    struct dirent *entry;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d", cpu);
    DIR *directory = opendir(path);
    check(directory != NULL, path);
    while ((entry = readdir(directory)) != NULL)
        if (sscanf(entry->d_name, "node%d", &node) == 1)
            break;
    closedir(directory);
    return node;
}

static void serve(int port, int count)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, sockets[MOST];
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
    check(listen(listener, MOST) == 0, "listen");
    for (int at = 0; at < count; at++)
        check((sockets[at] = accept(listener, NULL, NULL)) >= 0, "accept");
    for (int round = 0; round < ROUNDS; round++)
        for (int at = 0; at < count; at++) {
            char byte;
            check(recv(sockets[at], &byte, 1, 0) == 1, "recv");
            check(send(sockets[at], &byte, 1, 0) == 1, "send");
        }
    cpu_set_t mine;
    check(sched_getaffinity(0, sizeof mine, &mine) == 0, "sched_getaffinity");
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &mine))
            printf("program may use processor %d of node %d\n", cpu, node_of(cpu));
    for (int at = 0; at < count; at++) {
        int cpu = -1;
        socklen_t length = sizeof cpu;
        check(getsockopt(sockets[at], SOL_SOCKET, SO_INCOMING_CPU, &cpu, &length) == 0, "SO_INCOMING_CPU");
        printf("connection at processor %d of node %d\n", cpu, cpu < 0 ? -1 : node_of(cpu));
    }
    fflush(stdout);
    /* Until the visitor has looked. */
    char byte;
    check(recv(sockets[0], &byte, 1, 0) == 1, "recv");
}

static void visit(const char *where, int port, int count, const char *command)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
    int sockets[MOST];
    check(inet_pton(AF_INET, where, &address.sin_addr) == 1, where);
    for (int at = 0; at < count; at++) {
        int tries = 0;
        sockets[at] = socket(AF_INET, SOCK_STREAM, 0);
        /* The server may not be there yet. */
        while (connect(sockets[at], (struct sockaddr *)&address, sizeof address) != 0) {
            check(++tries < 600, "connect");
            /* Waits: between two tries. */
            usleep(100000);
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        char byte = 'x';
        /* The server may have accepted them in another order. */
        for (int at = 0; at < count; at++)
            check(send(sockets[at], &byte, 1, 0) == 1, "send");
        for (int at = 0; at < count; at++)
            check(recv(sockets[at], &byte, 1, 0) == 1, "recv");
    }
    check(system(command) == 0, command);
    for (int at = 0; at < count; at++)
        check(send(sockets[at], "x", 1, 0) == 1, "send");
}

int main(int count, char **arguments)
{
    if (count == 4 && strcmp(arguments[1], "serve") == 0 && atoi(arguments[3]) <= MOST)
        serve(atoi(arguments[2]), atoi(arguments[3]));
    else if (count == 6 && strcmp(arguments[1], "visit") == 0 && atoi(arguments[4]) <= MOST)
        visit(arguments[2], atoi(arguments[3]), atoi(arguments[4]), arguments[5]);
    else
        return 2;
    return 0;
}

/* A program that exchanges over a connection, and one that starts another, in every way.
 *
 *     starts serve [CASE]     (moved: once its connection is on the NIC)
 *     starts held [ring]      (prints what the process holds afterwards; with a ring of io_uring that a thread of the kernel's polls)
 *     starts overflow
 *     starts exec WAY PROGRAM [ARGUMENT...]   (at most two arguments; execle: at least one) */

#include "sockets.h"
#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

#ifdef GO
/* The note by which Go's linker marks a program. */
__attribute__((section(".note.go.buildid"), used, aligned(4))) static const struct {
    unsigned name_length, text_length, type;
    char name[4], text[4];
} mark = {4, 4, 4, "Go", "id"};
#endif

static void serve(int moved)
{
    struct pair pair = connect_pair();
    exchange(pair.client, pair.server, "the first\n");
    if (moved) {
        until_on_nic(pair.client);
        until_on_nic(pair.server);
    }
    for (int round = 0; round < 100; round++) {
        char line[20];
        CHECK(snprintf(line, sizeof line, "round %d\n", round) > 0);
        exchange(pair.client, pair.server, line);
        CHECK(send(pair.server, line, strlen(line), 0) == (ssize_t)strlen(line));
        CHECK(recv(pair.client, line, strlen(line), MSG_WAITALL) == (ssize_t)strlen(line));
    }
    close(pair.client);
    close(pair.server);
}

static int entries(const char *path)
{
    int found = 0;
    DIR *directory = opendir(path);
    CHECK(directory);
    while (readdir(directory))
        found++;
    closedir(directory);
    return found;
}

static void hold(int has_ring)
{
    /* struct io_uring_params, whose third number is IORING_SETUP_SQPOLL. */
    unsigned parameters[30] = {[2] = 1 << 1};
    CHECK(!has_ring || syscall(425, 4, parameters) >= 0);
    serve(0);
    printf("%d in /proc/self/fd, %d in /proc/self/task\n", entries("/proc/self/fd"), entries("/proc/self/task"));
}

/* What AddressSanitizer is for: more is received than there is room for. */
static void overflow(void)
{
    struct pair pair = connect_pair();
    exchange(pair.client, pair.server, "the first\n");
    until_on_nic(pair.server);
    CHECK(write(pair.client, "0123456789abcdef", 16) == 16);
    volatile size_t length = 16;
    char *room = malloc(8);
    CHECK(recv(pair.server, room, length, MSG_WAITALL) == 16);
    free(room);
}

static const char *base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Its directory is the only one in PATH, so that the calls that search there find it under its name alone. */
static void search_only(const char *path)
{
    static char directory[4096];
    size_t length = base(path) - path;
    CHECK(length > 1 && length < sizeof directory);
    memcpy(directory, path, length - 1);
    CHECK(setenv("PATH", directory, 1) == 0);
}

static int become(const char *way, char **words)
{
    const char *path = words[0], *name = base(path);
    if (strchr(way, 'p') && strcmp(way, "posix_spawn") != 0)
        search_only(path);
    if (strcmp(way, "execve") == 0)
        return execve(path, words, environ);
    if (strcmp(way, "execv") == 0)
        return execv(path, words);
    if (strcmp(way, "execvp") == 0)
        return execvp(name, words);
    if (strcmp(way, "execvpe") == 0)
        return execvpe(name, words, environ);
    if (strcmp(way, "fexecve") == 0)
        return fexecve(open(path, O_RDONLY | O_CLOEXEC), words, environ);
    if (strcmp(way, "execl") == 0)
        return execl(path, words[0], words[1], words[2], NULL);
    if (strcmp(way, "execlp") == 0)
        return execlp(name, words[0], words[1], words[2], NULL);
    if (strcmp(way, "execle") == 0)
        return words[2] ? execle(path, words[0], words[1], words[2], NULL, environ) : execle(path, words[0], words[1], NULL, environ);
    if (strcmp(way, "execveat") == 0)
        return syscall(SYS_execveat, AT_FDCWD, path, words, environ, 0);
#ifdef __GLIBC__
    if (strcmp(way, "execveat of the C library") == 0)
        return execveat(AT_FDCWD, path, words, environ, 0);
#endif
    if (strcmp(way, "syscall") == 0)
        return syscall(SYS_execve, path, words, environ);
    CHECK(!"such a way");
    return -1;
}

static int await(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int start(const char *way, char **words)
{
    pid_t child;
    if (strcmp(way, "posix_spawn") == 0) {
        CHECK(posix_spawn(&child, words[0], NULL, NULL, words, environ) == 0);
        return await(child);
    }
    if (strcmp(way, "posix_spawnp") == 0) {
        search_only(words[0]);
        CHECK(posix_spawnp(&child, base(words[0]), NULL, NULL, words, environ) == 0);
        return await(child);
    }
    int twice = strcmp(way, "fork twice") == 0;
    if (twice || strcmp(way, "vfork") == 0) {
        for (int at = 0; at <= twice; at++) {
            child = twice ? fork() : vfork();
            if (child == 0) {
                execve(words[0], words, environ);
                _exit(9);
            }
            CHECK(await(child) == 0);
        }
        return 0;
    }
    if (strcmp(way, "system") == 0 || strcmp(way, "popen") == 0) {
        char line[4096] = "exec";
        for (; *words; words++)
            snprintf(line + strlen(line), sizeof line - strlen(line), " '%s'", *words);
        int status = *way == 's' ? system(line) : pclose(popen(line, "w"));
        CHECK(WIFEXITED(status));
        return WEXITSTATUS(status);
    }
    become(way, words);
    CHECK(!"executed");
    return 9;
}

int main(int count, char **words)
{
    alarm(STANDS_STILL);
    if (count > 1 && strcmp(words[1], "serve") == 0) {
        serve(strcmp(words[count - 1], "moved") == 0);
        return 0;
    }
    if (count > 1 && strcmp(words[1], "held") == 0) {
        hold(count > 2);
        return 0;
    }
    if (count > 1 && strcmp(words[1], "overflow") == 0) {
        overflow();
        return 0;
    }
    CHECK(count >= 4 && count <= 6 && strcmp(words[1], "exec") == 0);
    char *next[4] = {0};
    for (int at = 3; at < count; at++)
        next[at - 3] = words[at];
    return start(words[2], next);
}

/* Processes that use a connection of their parent's, made in every way: what they receive and send is a part of its streams. */

#include "flows.h"
#include <sched.h>
#include <spawn.h>
#include <sys/wait.h>

/* What a child does. */
enum task { NOTHING, READS, WRITES, CLOSES, TASKS };

struct errand {
    enum task task;
    int fd;
    const unsigned char *bytes;
    size_t length;
};

extern char **environ;
static char self_path[400];
static _Atomic int child_now;

/* Uses nothing that another thread may have had at the fork. */
static int do_errand(void *of)
{
    const struct errand *errand = of;
    unsigned char got[2048];
    switch (errand->task) {
    case READS:
        for (size_t have = 0; have < errand->length;) {
            ssize_t done = read(errand->fd, got + have, errand->length - have);
            if (done <= 0)
                return done == 0 ? 21 : 100 + errno % 100;
            have += done;
        }
        return memcmp(got, errand->bytes, errand->length) == 0 ? 0 : 22;
    case WRITES:
        for (size_t sent = 0; sent < errand->length;) {
            ssize_t done = write(errand->fd, errand->bytes + sent, errand->length - sent);
            if (done <= 0)
                return 100 + errno % 100;
            sent += done;
        }
        return 0;
    case CLOSES: return close(errand->fd) == 0 ? 0 : 23;
    default: return 0;
    }
}

static int do_errand_and_exit(void *of)
{
    _exit(do_errand(of));
}

/* The same in a program of its own: `hostile errand TASK FD PLACE LENGTH`. */
static char **errand_words(const struct errand *errand)
{
    static char numbers[4][24], *words[] = {self_path, "errand", numbers[0], numbers[1], numbers[2], numbers[3], NULL};
    snprintf(numbers[0], sizeof numbers[0], "%d", errand->task);
    snprintf(numbers[1], sizeof numbers[1], "%d", errand->fd);
    snprintf(numbers[2], sizeof numbers[2], "%zu", errand->bytes - pattern);
    snprintf(numbers[3], sizeof numbers[3], "%zu", errand->length);
    return words;
}

static int errand_main(char **words)
{
    struct errand errand = {atoi(words[2]), atoi(words[3]), pattern + atol(words[4]), atol(words[5])};
    make_pattern();
    return do_errand(&errand);
}

static const char *const child_names[] = {"fork", "_Fork", "clone", "unseen fork", "vfork", "vfork and exec", "fork and exec", "posix_spawn", "system", "popen"};
#define CHILD_KINDS 10
/* From this one on they start a program, which takes longer. */
#define FIRST_PROGRAM 5

static char *errand_line(const struct errand *errand)
{
    static char line[600];
    char **words = errand_words(errand);
    snprintf(line, sizeof line, "exec %s %s %s %s %s %s", words[0], words[1], words[2], words[3], words[4], words[5]);
    return line;
}

/* Makes a child of this kind, and returns its wait status. */
static int run_child(int kind, const struct errand *errand)
{
    static char stack[1 << 18] __attribute__((aligned(16)));
    char **words = errand_words(errand);
    char *line = errand_line(errand);
    pid_t (*fork_alone)(void) = _Fork;
    FILE *stream;
    int status;
    pid_t child = -1;
    switch (kind) {
    case 0: child = fork(); break;
    case 1: child = fork_alone(); break;
    case 2: child = clone(do_errand_and_exit, stack + sizeof stack, SIGCHLD, (void *)errand); break;
    case 3:
        if ((child = RAW3(SYS_fork, 0, 0, 0)) == 0)
            RAW3(SYS_exit_group, 0, 0, 0);
        break;
    case 4:
        if ((child = vfork()) == 0)
            _exit(do_errand((void *)errand));
        break;
    case 5:
        if ((child = vfork()) == 0) {
            execv(self_path, words);
            _exit(127);
        }
        break;
    case 6:
        if ((child = fork()) == 0) {
            execv(self_path, words);
            _exit(127);
        }
        break;
    case 7: CHECK(posix_spawn(&child, self_path, NULL, NULL, words, environ) == 0); break;
    case 8: return system(line);
    default:
        CHECK((stream = popen(line, "r")) != NULL);
        while (fgetc(stream) != EOF)
            ;
        return pclose(stream);
    }
    if (child == 0)
        _exit(do_errand((void *)errand));
    CHECK(child > 0);
    child_now = child;
    while (waitpid(child, &status, 0) < 0)
        CHECK(errno == EINTR);
    child_now = 0;
    return status;
}

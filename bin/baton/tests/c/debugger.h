/* What a debugger does to a thread that sleeps in a call, and how such a thread is recognised. */

#include "sockets.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

/* The state of a thread, as in its entry of /proc; X if there is no such thread. */
static inline char state_of(pid_t process, pid_t thread)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", process, thread);
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return 'X';
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    char *end = length > 0 ? strrchr(text, ')') : NULL;
    return end ? end[2] : 'X';
}

/* Waits until a thread sleeps, or has ended. */
static inline void until_it_sleeps(pid_t process, pid_t thread)
{
    for (int seen = 0; seen < 3;) {
        char state = state_of(process, thread);
        if (state == 'X' || state == 'Z')
            return;
        seen = state == 'S' ? seen + 1 : 0;
        sched_yield();
    }
}

/* Stops a thread that sleeps in a call, lets it go on, stops it when it sleeps again, and leaves it: as gdb does, by a signal, or as strace
 * does (`seizes`). A call that has not gone on may have ended the thread. */
static inline void debug(pid_t process, pid_t thread, int seizes)
{
    until_it_sleeps(process, thread);
    while (ptrace(seizes ? PTRACE_SEIZE : PTRACE_ATTACH, thread, NULL, NULL) != 0) {
        if (errno == ESRCH)
            return;
        /* Somebody else traces it for a moment. */
        CHECK(errno == EPERM);
        sched_yield();
    }
    for (int stops = 1;; stops++) {
        int status;
        if (seizes)
            ptrace(PTRACE_INTERRUPT, thread, NULL, NULL);
        else if (stops > 1)
            syscall(SYS_tgkill, process, thread, SIGSTOP);
        if (waitpid(thread, &status, __WALL) != thread || !WIFSTOPPED(status))
            return;
        if (stops == 2)
            break;
        CHECK(ptrace(PTRACE_CONT, thread, NULL, NULL) == 0);
        until_it_sleeps(process, thread);
    }
    CHECK(ptrace(PTRACE_DETACH, thread, NULL, NULL) == 0);
}

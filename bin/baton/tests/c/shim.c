/* A program's own library for LD_PRELOAD: at the end it says on standard output how often its calls were made, and how many bytes they
 * transferred. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
    const char *name;
    long calls, bytes;
} counts[] = {{"read", 0, 0}, {"write", 0, 0}, {"recv", 0, 0}, {"send", 0, 0}, {"close", 0, 0}};

static long count(int which, long got)
{
    counts[which].calls++;
    counts[which].bytes += got;
    return got;
}

/* The next functions are looked up once: dlsym takes a lock, in the middle of which a handler may leave a call. */
#define NEXT(name) next_##name
static __typeof__(read) *next_read;
static __typeof__(write) *next_write;
static __typeof__(recv) *next_recv;
static __typeof__(send) *next_send;
static __typeof__(close) *next_close;

__attribute__((constructor)) static void look_up(void)
{
    next_read = (__typeof__(read) *)dlsym(RTLD_NEXT, "read");
    next_write = (__typeof__(write) *)dlsym(RTLD_NEXT, "write");
    next_recv = (__typeof__(recv) *)dlsym(RTLD_NEXT, "recv");
    next_send = (__typeof__(send) *)dlsym(RTLD_NEXT, "send");
    next_close = (__typeof__(close) *)dlsym(RTLD_NEXT, "close");
}

ssize_t read(int fd, void *to, size_t length)
{
    return count(0, NEXT(read)(fd, to, length));
}

ssize_t write(int fd, const void *from, size_t length)
{
    return count(1, NEXT(write)(fd, from, length));
}

ssize_t recv(int fd, void *to, size_t length, int flags)
{
    return count(2, NEXT(recv)(fd, to, length, flags));
}

ssize_t send(int fd, const void *from, size_t length, int flags)
{
    return count(3, NEXT(send)(fd, from, length, flags));
}

int close(int fd)
{
    return count(4, NEXT(close)(fd));
}

__attribute__((destructor)) static void tell(void)
{
    char line[200];
    for (unsigned at = 0; at < sizeof counts / sizeof *counts; at++) {
        int length = snprintf(line, sizeof line, "%s %ld %ld\n", counts[at].name, counts[at].calls, counts[at].bytes);
        syscall(SYS_write, 1, line, length);
    }
}

/* A malloc that reads files, as one does that looks for its settings or for the processors: its calls on descriptors pass through whatever
 * stands before them. */

#ifdef READING_MALLOC
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
#include <errno.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void __libc_free(void *);

/* One of several calls reads. */
static _Thread_local unsigned mallocs;

static void read_a_file(void)
{
    if (mallocs++ % 4 != 0)
        return;
    char text[64];
    int number = errno, state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    int fd = open("/proc/self/oom_score", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, text, sizeof text) <= 0)
            _exit(5);
        close(fd);
    }
    pthread_setcancelstate(state, &state);
    errno = number;
}

void *malloc(size_t size)
{
    read_a_file();
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    read_a_file();
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    read_a_file();
    return __libc_realloc(old, size);
}

void free(void *old)
{
    read_a_file();
    __libc_free(old);
}
#endif

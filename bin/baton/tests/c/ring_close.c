/* A ring of io_uring that the library does not know closes a socket: the peer gets its FIN at once, as natively, and not when the program
 * ends. The ring is set up by a system call that no library sees. Usage: ring_close CASE [moved] */

#include "sockets.h"
#include <linux/io_uring.h>
#include <sys/mman.h>

static struct pair ends;

/* A system call by an instruction of this program's own. */
static long set_up(unsigned entries, struct io_uring_params *parameters)
{
    long done;
    __asm__ volatile("syscall" : "=a"(done) : "a"((long)SYS_io_uring_setup), "D"((long)entries), "S"(parameters) : "rcx", "r11", "memory");
    return done;
}

static void *map(int ring, size_t length, off_t what)
{
    void *mapped = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    CHECK(mapped != MAP_FAILED);
    return mapped;
}

static void by_ring(void)
{
    struct io_uring_params parameters = {0};
    int ring = set_up(8, &parameters);
    CHECK(ring >= 0);
    char *queue = map(ring, parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    struct io_uring_sqe *entry = map(ring, parameters.sq_entries * sizeof *entry, IORING_OFF_SQES);
    unsigned *tail = (unsigned *)(queue + parameters.sq_off.tail);
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_CLOSE;
    entry->fd = ends.server;
    ((unsigned *)(queue + parameters.sq_off.array))[0] = 0;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
    char byte;
    CHECK(read(ends.client, &byte, 1) == 0);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {{"ring", by_ring}};
    alarm(STANDS_STILL);
    CHECK(count >= 2);
    ends = connect_used(count > 2);
    return run_case(cases, sizeof cases / sizeof cases[0], arguments[1]);
}

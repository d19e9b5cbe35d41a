/* What a connection on the NIC adds to a program's memory: address space, locked memory, core files.
 *
 *     memory CASE [moved] */

#include "sockets.h"
#include <sys/mman.h>
#include <sys/resource.h>

/* Most kilobytes that the library may add: its own and a connection's. */
enum { MOST = 32 << 10, MOST_LOCKED = 8 << 10, MOST_DUMPED = 8 << 10 };

static int moved;

static long status(const char *field)
{
    char line[200];
    long value = -1;
    FILE *file = fopen("/proc/self/status", "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (strncmp(line, field, strlen(field)) == 0)
            CHECK(sscanf(line + strlen(field), ": %ld", &value) == 1);
    fclose(file);
    return value;
}

static struct pair connected(void)
{
    struct pair pair = connect_used(moved);
    if (moved)
        until_on_nic(pair.client);
    return pair;
}

/* More than one connection's memory. */
static void use(struct pair pair)
{
    static char sent[40000], got[sizeof sent];
    for (size_t at = 0; at < sizeof sent; at++)
        sent[at] = at * 7 / 5;
    for (int round = 0; round < 20; round++) {
        CHECK(write(pair.client, sent, sizeof sent) == sizeof sent);
        CHECK(recv(pair.server, got, sizeof got, MSG_WAITALL) == sizeof got && memcmp(sent, got, sizeof got) == 0);
    }
}

static void address_space(void)
{
    long before = status("VmSize");
    use(connected());
    use(connected());
    CHECK(status("VmSize") < before + MOST);
}

/* What there is is locked, and what comes. */
static void locked(void)
{
    use(connected());
    long before = status("VmLck"), whole = status("VmSize");
    CHECK(mlockall(MCL_CURRENT) == 0);
    CHECK(status("VmLck") > before && status("VmLck") <= whole);
    CHECK(whole < MOST + MOST_LOCKED);
    CHECK(munlockall() == 0 && mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    before = status("VmLck");
    for (int at = 0; at < 20; at++)
        use(connected());
    CHECK(status("VmLck") < before + MOST_LOCKED);
    void *own = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(own != MAP_FAILED && status("VmLck") >= before + 1024);
}

/* Before a program has a connection it locks what comes. */
static void locked_before(void)
{
    CHECK(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    long before = status("VmLck");
    for (int at = 0; at < 20; at++)
        use(connected());
    CHECK(status("VmLck") < before + MOST_LOCKED);
}

/* Little address space, then none. */
static void limited(void)
{
    struct rlimit most = {(status("VmSize") + MOST) << 10, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &most) == 0);
    struct pair pair = connected();
    use(pair);
    most.rlim_cur = status("VmSize") << 10;
    CHECK(setrlimit(RLIMIT_AS, &most) == 0);
    CHECK(mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == ENOMEM);
    struct pair pairs[20];
    for (int at = 0; at < 20; at++) {
        pairs[at] = connect_pair();
        for (int round = 0; round < 20; round++) {
            exchange(pairs[at].client, pairs[at].server, "there\n");
            exchange(pairs[at].server, pairs[at].client, "and back\n");
        }
    }
    for (int at = 0; at < 20; at++)
        use(pairs[at]);
    use(pair);
}

/* So little address space that a session's memory would take what the program needs itself. */
static void kept_free(void)
{
    struct rlimit most = {(status("VmSize") << 10) + (12 << 20), RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &most) == 0);
    struct pair pair = connect_pair();
    use(pair);
    char *own = malloc(10 << 20);
    CHECK(own);
    memset(own, 1, 10 << 20);
    use(pair);
    free(own);
}

/* Kilobytes of mappings shared with others that a core file contains. */
static void dumped(void)
{
    use(connected());
    char line[600], name[600] = "";
    long size = 0, shared = 0, all = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%*x-%*x %599s", name) == 1 && strlen(name) == 4)
            shared = name[3] == 's';
        sscanf(line, "Size: %ld kB", &size);
        if (strncmp(line, "VmFlags:", 8) == 0 && shared && !strstr(line, " dd"))
            all += size;
    }
    fclose(maps);
    CHECK(all < MOST_DUMPED);
}

int main(int count, char **words)
{
    static const struct test_case cases[] = {
        {"address space", address_space},
        {"locked", locked},
        {"locked before", locked_before},
        {"limited", limited},
        {"kept free", kept_free},
        {"dumped", dumped},
    };
    alarm(STANDS_STILL);
    CHECK(count > 1);
    moved = count > 2 && strcmp(words[2], "moved") == 0;
    return run_case(cases, sizeof cases / sizeof *cases, words[1]);
}

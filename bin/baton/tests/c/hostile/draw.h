/* What is drawn, from a seed, and the numbered bytes that cross connections. */

#include "../sockets.h"
#include <stdint.h>
#include <sys/mman.h>

struct random {
    uint64_t state;
};

/* SplitMix64. */
static inline uint64_t draw(struct random *random)
{
    uint64_t mixed = random->state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
}

static inline unsigned below(struct random *random, unsigned limit)
{
    return draw(random) % limit;
}

static inline int one_in(struct random *random, unsigned many)
{
    return below(random, many) == 0;
}

/* A generator of its own for each part of a round, so that none depends on what another one does in time. */
static inline struct random part(struct random *random)
{
    return (struct random){draw(random)};
}

/* A length: mostly small, now and then large, at most `limit`. */
static inline size_t draw_length(struct random *random, size_t limit)
{
    size_t most = (size_t[]){8, 100, 1500, 4096, 1 << 20}[below(random, 5)];
    return 1 + below(random, most < limit ? most : limit);
}

/* Bytes of a stream are a part of this, from a place of its own on. None has its highest bit set: BLANK is what nobody has written yet, and
 * SKIP is followed by the position, in 4 × 7 bits, at which a writer goes on that does not know how much of its last call was sent. */
#define PATTERN (1 << 19)
#define MOST (1 << 18)
#define BLANK 0xff
#define SKIP 0xfe
#define SKIP_LENGTH 5

static unsigned char pattern[PATTERN];
static int pattern_file;

static inline void make_pattern(void)
{
    struct random random = {7};
    for (size_t at = 0; at < PATTERN; at++)
        pattern[at] = draw(&random) & 0x7f;
    CHECK((pattern_file = memfd_create("pattern", MFD_CLOEXEC)) >= 0);
    CHECK(write(pattern_file, pattern, PATTERN) == PATTERN);
}

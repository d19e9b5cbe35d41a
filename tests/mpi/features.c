/* MPI as programs use it, one feature after the other. Every byte that is received is checked against what its sender must have
 * sent; rank 0 prints one line per feature with a checksum over all ranks, so that runs over different transports can be compared.
 *
 * features [--threads 0] [--largest BYTES] [--messages COUNT] [--repeat TIMES] [--die RANK] [FEATURE...]
 *
 * --die: this rank is killed while the others receive from it and send to it; they must not hang. */
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;
static long threaded = 1;
static long largest = 1 << 20, messages = 2000, repeat = 1, dying = -1;
static uint64_t sum;

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "rank %d: %s:%d: %s\n", rank, __FILE__, __LINE__, #condition); \
			MPI_Abort(MPI_COMM_WORLD, 1); \
		} \
	} while (0)

static unsigned char byte(int sender, int tag, long at) { return (unsigned char)(sender * 131 + tag * 31 + at * 7 + (at >> 8)); }

static unsigned char *filled(int sender, int tag, long length)
{
	unsigned char *bytes = malloc(length + 1);
	for (long at = 0; at < length; at++)
		bytes[at] = byte(sender, tag, at);
	return bytes;
}

static void check(const unsigned char *bytes, int sender, int tag, long length)
{
	for (long at = 0; at < length; at++) {
		CHECK(bytes[at] == byte(sender, tag, at));
		sum += bytes[at] * (uint64_t)(at % 251 + 1);
	}
}

/* Sizes around every limit of the transport: one packet, the first packet and one more, a grant, several grants. */
static long next_size(long size) { return size < 8 ? size + 1 : size * 2 + (size % 3) - 1; }

static int right(void) { return (rank + 1) % ranks; }
static int left(void) { return (rank + ranks - 1) % ranks; }

static void sizes(void)
{
	for (long size = 0; size <= largest; size = next_size(size)) {
		unsigned char *out = filled(rank, 1, size), *in = malloc(size + 1);
		MPI_Status status;
		int count;
		MPI_Sendrecv(out, size, MPI_BYTE, right(), 1, in, size, MPI_BYTE, left(), 1, MPI_COMM_WORLD, &status);
		MPI_Get_count(&status, MPI_BYTE, &count);
		CHECK(count == size && status.MPI_SOURCE == left() && status.MPI_TAG == 1);
		check(in, left(), 1, size);
		free(out);
		free(in);
	}
}

static void modes(void)
{
	long lengths[] = {0, 1, 1000, 100000};
	int size = 1 << 20;
	void *room = malloc(size);
	MPI_Buffer_attach(room, size);
	for (int which = 0; which < 4; which++) {
		long length = lengths[which];
		for (int mode = 0; mode < 4; mode++) {
			unsigned char *out = filled(rank, mode, length), *in = malloc(length + 1);
			MPI_Request receive, send;
			MPI_Irecv(in, length, MPI_BYTE, left(), mode, MPI_COMM_WORLD, &receive);
			/* A ready send may only begin when its receive is posted. */
			MPI_Barrier(MPI_COMM_WORLD);
			switch (mode) {
			case 0: MPI_Isend(out, length, MPI_BYTE, right(), mode, MPI_COMM_WORLD, &send); break;
			case 1: MPI_Issend(out, length, MPI_BYTE, right(), mode, MPI_COMM_WORLD, &send); break;
			case 2: MPI_Ibsend(out, length, MPI_BYTE, right(), mode, MPI_COMM_WORLD, &send); break;
			default: MPI_Irsend(out, length, MPI_BYTE, right(), mode, MPI_COMM_WORLD, &send); break;
			}
			MPI_Wait(&receive, MPI_STATUS_IGNORE);
			MPI_Wait(&send, MPI_STATUS_IGNORE);
			check(in, left(), mode, length);
			free(out);
			free(in);
		}
	}
	MPI_Buffer_detach(&room, &size);
	free(room);
}

/* Everybody sends to rank 0, which takes what comes from whom it comes, in the order of each sender. */
static void wildcards(void)
{
	const int each = 50;
	if (rank != 0) {
		for (int at = 0; at < each; at++) {
			unsigned char *out = filled(rank, at, 10 * at);
			MPI_Send(out, 10 * at, MPI_BYTE, 0, at, MPI_COMM_WORLD);
			free(out);
		}
		return;
	}
	int *next = calloc(ranks, sizeof(int));
	unsigned char *in = malloc(10 * each);
	for (int at = 0; at < each * (ranks - 1); at++) {
		MPI_Status status;
		int count;
		MPI_Recv(in, 10 * each, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
		MPI_Get_count(&status, MPI_BYTE, &count);
		CHECK(status.MPI_TAG == next[status.MPI_SOURCE]++);
		CHECK(count == 10 * status.MPI_TAG);
		check(in, status.MPI_SOURCE, status.MPI_TAG, count);
	}
	free(in);
	free(next);
}

static void probes(void)
{
	long lengths[] = {3, 5000, 200000};
	for (int which = 0; which < 3; which++) {
		unsigned char *out = filled(rank, 7 + which, lengths[which]);
		MPI_Request send;
		MPI_Isend(out, lengths[which], MPI_BYTE, right(), 7 + which, MPI_COMM_WORLD, &send);
		MPI_Status status;
		int count, found = 0;
		unsigned char *in;
		if (which == 1) {
			MPI_Message message;
			while (!found)
				MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, &message, &status);
			MPI_Get_count(&status, MPI_BYTE, &count);
			in = malloc(count + 1);
			MPI_Mrecv(in, count, MPI_BYTE, &message, &status);
		} else {
			while (!found)
				MPI_Iprobe(left(), 7 + which, MPI_COMM_WORLD, &found, &status);
			MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
			MPI_Get_count(&status, MPI_BYTE, &count);
			in = malloc(count + 1);
			MPI_Recv(in, count, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, MPI_COMM_WORLD, &status);
		}
		CHECK(count == lengths[which] && status.MPI_SOURCE == left() && status.MPI_TAG == 7 + which);
		check(in, left(), 7 + which, count);
		MPI_Wait(&send, MPI_STATUS_IGNORE);
		free(out);
		free(in);
		MPI_Barrier(MPI_COMM_WORLD);
	}
}

static void cancels(void)
{
	unsigned char in[64], value = 9;
	MPI_Request request;
	MPI_Status status;
	int cancelled;
	MPI_Irecv(in, sizeof in, MPI_BYTE, left(), 1000, MPI_COMM_WORLD, &request);
	MPI_Cancel(&request);
	MPI_Wait(&request, &status);
	MPI_Test_cancelled(&status, &cancelled);
	CHECK(cancelled);
	/* What was cancelled takes no message. Nobody sends before all have cancelled. */
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Sendrecv(&value, 1, MPI_BYTE, right(), 1000, in, 1, MPI_BYTE, left(), 1000, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	CHECK(in[0] == 9);
	sum += in[0];
}

static void persistent(void)
{
	long lengths[] = {100, 50000};
	for (int which = 0; which < 2; which++) {
		unsigned char *out = malloc(lengths[which]), *in = malloc(lengths[which]);
		MPI_Request both[2];
		MPI_Send_init(out, lengths[which], MPI_BYTE, right(), 3, MPI_COMM_WORLD, &both[0]);
		MPI_Recv_init(in, lengths[which], MPI_BYTE, left(), 3, MPI_COMM_WORLD, &both[1]);
		for (int round = 0; round < 20; round++) {
			for (long at = 0; at < lengths[which]; at++)
				out[at] = byte(rank, round, at);
			MPI_Startall(2, both);
			MPI_Waitall(2, both, MPI_STATUSES_IGNORE);
			check(in, left(), round, lengths[which]);
		}
		MPI_Request_free(&both[0]);
		MPI_Request_free(&both[1]);
		free(out);
		free(in);
	}
}

/* Derived types with gaps, which the library packs or passes on as several parts. */
static void datatypes(void)
{
	enum { ROWS = 300, WIDTH = 40, PIECE = 16 };
	unsigned char *out = calloc(ROWS, WIDTH), *in = calloc(ROWS, WIDTH);
	MPI_Datatype columns;
	MPI_Type_vector(ROWS, PIECE, WIDTH, MPI_BYTE, &columns);
	MPI_Type_commit(&columns);
	for (int at = 0; at < ROWS * WIDTH; at++)
		out[at] = byte(rank, 5, at);
	MPI_Sendrecv(out, 1, columns, right(), 5, in, 1, columns, left(), 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	for (int at = 0; at < ROWS * WIDTH; at++) {
		CHECK(in[at] == (at % WIDTH < PIECE ? byte(left(), 5, at) : 0));
		sum += in[at];
	}
	MPI_Type_free(&columns);
	free(out);
	free(in);
}

static void collectives(void)
{
	for (int count = 1; count <= 20000; count *= 27) {
		long *out = malloc(sizeof(long) * count * ranks), *in = malloc(sizeof(long) * count * ranks);
		for (int at = 0; at < count * ranks; at++)
			out[at] = rank * 1000003L + at;
		MPI_Allreduce(out, in, count, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
		for (int at = 0; at < count; at++) {
			CHECK(in[at] == ranks * (ranks - 1) / 2 * 1000003L + (long)ranks * at);
			sum += in[at];
		}
		MPI_Alltoall(out, count, MPI_LONG, in, count, MPI_LONG, MPI_COMM_WORLD);
		for (int from = 0; from < ranks; from++)
			for (int at = 0; at < count; at++) {
				CHECK(in[from * count + at] == from * 1000003L + rank * count + at);
				sum += in[from * count + at];
			}
		MPI_Allgather(out, count, MPI_LONG, in, count, MPI_LONG, MPI_COMM_WORLD);
		for (int from = 0; from < ranks; from++)
			CHECK(in[from * count + count - 1] == from * 1000003L + count - 1);
		for (int root = 0; root < ranks; root++) {
			memcpy(in, out, sizeof(long) * count);
			MPI_Bcast(in, count, MPI_LONG, root, MPI_COMM_WORLD);
			CHECK(in[count - 1] == root * 1000003L + count - 1);
			MPI_Scatter(out, count, MPI_LONG, in, count, MPI_LONG, root, MPI_COMM_WORLD);
			CHECK(in[0] == root * 1000003L + rank * count);
			MPI_Gather(out, count, MPI_LONG, in, count, MPI_LONG, root, MPI_COMM_WORLD);
			if (rank == root)
				CHECK(in[(ranks - 1) * count] == (ranks - 1) * 1000003L);
		}
		MPI_Request barrier;
		MPI_Ibarrier(MPI_COMM_WORLD, &barrier);
		MPI_Wait(&barrier, MPI_STATUS_IGNORE);
		free(out);
		free(in);
	}
	MPI_Comm half;
	MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
	int mine = rank, all = 0;
	MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, half);
	sum += all;
	MPI_Comm_free(&half);
}

static void onesided(void)
{
	const int count = 30000;
	long *memory, *local = malloc(sizeof(long) * count);
	MPI_Win window;
	MPI_Win_allocate(sizeof(long) * (count + 1) * 2, sizeof(long), MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
	memset(memory, 0, sizeof(long) * (count + 1) * 2);
	for (int at = 0; at < count; at++)
		local[at] = rank * 7919L + at;
	MPI_Win_fence(0, window);
	MPI_Put(local, count, MPI_LONG, right(), 0, count, MPI_LONG, window);
	MPI_Win_fence(0, window);
	for (int at = 0; at < count; at++)
		CHECK(memory[at] == left() * 7919L + at);
	memset(local, 0, sizeof(long) * count);
	MPI_Get(local, count, MPI_LONG, right(), 0, count, MPI_LONG, window);
	MPI_Win_fence(0, window);
	for (int at = 0; at < count; at++) {
		CHECK(local[at] == rank * 7919L + at);
		sum += local[at];
	}
	/* Passive target: everybody adds to rank 0, which does nothing for it. */
	long one = 1 + rank, before;
	for (int round = 0; round < 20; round++) {
		MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
		MPI_Accumulate(&one, 1, MPI_LONG, 0, count, 1, MPI_LONG, MPI_SUM, window);
		MPI_Fetch_and_op(&one, &before, MPI_LONG, 0, count + 1, MPI_SUM, window);
		MPI_Win_unlock(0, window);
	}
	MPI_Win_fence(0, window);
	if (rank == 0) {
		CHECK(memory[count] == 20L * ranks * (ranks + 1) / 2 && memory[count + 1] == memory[count]);
		sum += memory[count];
	}
	MPI_Win_free(&window);
	free(local);
}

static void *talk(void *argument)
{
	int tag = (int)(intptr_t)argument;
	for (int round = 0; round < 100; round++) {
		long out = rank * 1000000L + tag * 1000 + round, in = 0;
		MPI_Sendrecv(&out, 1, MPI_LONG, right(), tag, &in, 1, MPI_LONG, left(), tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		CHECK(in == left() * 1000000L + tag * 1000 + round);
	}
	return NULL;
}

static void threads(void)
{
	pthread_t all[4];
	if (!threaded)
		return;
	for (int at = 0; at < 4; at++)
		pthread_create(&all[at], NULL, talk, (void *)(intptr_t)(at + 1));
	for (int at = 0; at < 4; at++)
		pthread_join(all[at], NULL);
	sum += 400;
}

/* Many receives posted at once; then many messages that nobody waits for yet, received in the opposite order. */
static void outstanding(void)
{
	long *in = malloc(sizeof(long) * messages), *out = malloc(sizeof(long) * messages);
	MPI_Request *receives = malloc(sizeof(MPI_Request) * messages), *sends = malloc(sizeof(MPI_Request) * messages);
	for (int turn = 0; turn < 2; turn++) {
		for (long at = 0; at < messages; at++)
			out[at] = rank * 1000003L + at;
		if (turn == 0)
			for (long at = 0; at < messages; at++)
				MPI_Irecv(&in[at], 1, MPI_LONG, left(), at % 30000, MPI_COMM_WORLD, &receives[at]);
		for (long at = 0; at < messages; at++)
			MPI_Isend(&out[at], 1, MPI_LONG, right(), at % 30000, MPI_COMM_WORLD, &sends[at]);
		if (turn == 1) {
			for (long at = messages - 1; at >= 0; at--)
				MPI_Recv(&in[at], 1, MPI_LONG, left(), at % 30000, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Waitall(messages, receives, MPI_STATUSES_IGNORE);
		}
		MPI_Waitall(messages, sends, MPI_STATUSES_IGNORE);
		for (long at = 0; at < messages; at++) {
			CHECK(in[at] == left() * 1000003L + at);
			sum += in[at];
		}
		MPI_Barrier(MPI_COMM_WORLD);
	}
	free(in);
	free(out);
	free(receives);
	free(sends);
}

static const struct {
	const char *name;
	void (*run)(void);
} features[] = {
	{"sizes", sizes}, {"modes", modes}, {"wildcards", wildcards}, {"probes", probes}, {"cancels", cancels},
	{"persistent", persistent}, {"datatypes", datatypes}, {"collectives", collectives}, {"onesided", onesided},
	{"threads", threads}, {"outstanding", outstanding},
};

int main(int count, char **arguments)
{
	int provided, first = 1;
	for (int at = 1; at + 1 < count; at++)
		if (!strcmp(arguments[at], "--threads"))
			threaded = atol(arguments[at + 1]);
	MPI_Init_thread(&count, &arguments, threaded ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
	threaded = provided == MPI_THREAD_MULTIPLE;
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	for (; first + 1 < count && !strncmp(arguments[first], "--", 2); first += 2) {
		long value = atol(arguments[first + 1]);
		if (!strcmp(arguments[first], "--largest"))
			largest = value;
		else if (!strcmp(arguments[first], "--messages"))
			messages = value;
		else if (!strcmp(arguments[first], "--repeat"))
			repeat = value;
		else if (!strcmp(arguments[first], "--die"))
			dying = value;
	}
	if (dying >= 0) {
		unsigned char *out = filled(rank, 1, largest), *in = malloc(largest);
		MPI_Sendrecv(out, 1, MPI_BYTE, right(), 1, in, 1, MPI_BYTE, left(), 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		if (rank == dying)
			raise(SIGKILL);
		MPI_Sendrecv(out, largest, MPI_BYTE, dying, 2, in, largest, MPI_BYTE, dying, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		fprintf(stderr, "rank %d has talked with the dead\n", rank);
	}
	for (size_t at = 0; at < sizeof features / sizeof *features; at++) {
		int wanted = first == count;
		for (int argument = first; argument < count; argument++)
			wanted |= !strcmp(arguments[argument], features[at].name);
		if (!wanted)
			continue;
		uint64_t total = 0;
		double begin = MPI_Wtime();
		sum = 0;
		for (long time = 0; time < repeat; time++)
			features[at].run();
		MPI_Reduce(&sum, &total, 1, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
		if (rank == 0) {
			printf("%s %d %016llx\n", features[at].name, ranks, (unsigned long long)total);
			fprintf(stderr, "%s: %.3f s\n", features[at].name, MPI_Wtime() - begin);
			fflush(stdout);
		}
		MPI_Barrier(MPI_COMM_WORLD);
	}
	MPI_Finalize();
	return 0;
}

/* Two ranks exchange messages of one size. Rank 0 prints, as JSON, half a round trip in microseconds (median, least, mean and most),
 * megabytes per second, and milliseconds of its process's CPU per megabyte: of the thread that calls MPI, inside these calls, and of
 * all other threads. What rank 0 works is apart, however much others on the machine slow it down.
 *
 * mpi SIZE ROUNDS WORK: with WORK above 0, rank 0 works for that many microseconds between looks whether the messages have come. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static volatile unsigned long sink;

static void work(long steps)
{
	unsigned long value = sink;
	for (long step = 0; step < steps; step++)
		value = value * 6364136223846793005ul + 1442695040888963407ul;
	sink = value;
}

/* Seconds of CPU that a step of work takes: the least of several tries, so that a disturbed one does not count. */
static double calibrate(void)
{
	double least = 1;
	for (int try = 0; try < 20; try++) {
		double begin = seconds(CLOCK_THREAD_CPUTIME_ID);
		work(1000000);
		double took = (seconds(CLOCK_THREAD_CPUTIME_ID) - begin) / 1000000;
		least = took < least ? took : least;
	}
	return least;
}

static int ascending(const void *a, const void *b)
{
	double difference = *(const double *)a - *(const double *)b;
	return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments)
{
	int rank;
	MPI_Init(&count, &arguments);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	int size = atoi(arguments[1]), rounds = atoi(arguments[2]), warm = rounds / 10 + 1;
	double step = calibrate();
	long steps = atof(arguments[3]) / 1e6 / step;
	char *out = malloc(size + 1), *in = malloc(size + 1);
	double *times = calloc(rounds, sizeof(double)), cpu = 0, worked = 0;
	memset(out, 1, size + 1);
	for (int round = -warm; round < rounds; round++) {
		if (round == 0)
			cpu = seconds(CLOCK_PROCESS_CPUTIME_ID), worked = 0;
		double begin = seconds(CLOCK_MONOTONIC);
		if (rank == 0 && steps > 0) {
			MPI_Request both[2];
			int ended = 0;
			MPI_Irecv(in, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &both[0]);
			MPI_Isend(out, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &both[1]);
			while (!ended) {
				double start = seconds(CLOCK_THREAD_CPUTIME_ID);
				work(steps);
				worked += seconds(CLOCK_THREAD_CPUTIME_ID) - start;
				MPI_Testall(2, both, &ended, MPI_STATUSES_IGNORE);
			}
		} else if (rank == 0) {
			MPI_Send(out, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
			MPI_Recv(in, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(in, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(in, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
		}
		if (round >= 0)
			times[round] = (seconds(CLOCK_MONOTONIC) - begin) / 2;
	}
	cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu - worked;
	double sum = 0;
	for (int round = 0; round < rounds; round++)
		sum += times[round];
	qsort(times, rounds, sizeof(double), ascending);
	double median = times[rounds / 2], megabytes = 2e-6 * size * rounds;
	if (rank == 0) {
		printf("{\"median_us\":%.3f,\"least_us\":%.3f,\"mean_us\":%.3f,\"most_us\":%.3f,", median * 1e6, times[0] * 1e6,
		       sum / rounds * 1e6, times[rounds - 1] * 1e6);
		printf("\"mb_per_s\":%.3f,\"cpu_ms_per_mb\":%.6f,\"work_ms_per_mb\":%.6f,\"wrong\":%d}\n", size / median / 1e6,
		       megabytes > 0 ? cpu * 1e3 / megabytes : 0, megabytes > 0 ? worked * 1e3 / megabytes : 0, memcmp(in, out, size) != 0);
	}
	MPI_Finalize();
	return 0;
}

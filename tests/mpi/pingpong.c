/* The paper's ping-pong (section 5.1, Figure 6): latency in microseconds, one way, minimum, mean and maximum, and bandwidth.
 *
 * pingpong [LARGEST BYTES] */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank;

/* Seconds of one message one way. */
static double once(char *bytes, int size)
{
	double begin = MPI_Wtime();
	if (rank == 0) {
		MPI_Send(bytes, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(bytes, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	} else if (rank == 1) {
		MPI_Recv(bytes, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		MPI_Send(bytes, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
	}
	return (MPI_Wtime() - begin) / 2;
}

int main(int count, char **arguments)
{
	MPI_Init(&count, &arguments);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	int largest = count > 1 ? atoi(arguments[1]) : 1 << 20;
	char *bytes = malloc(largest);
	memset(bytes, 1, largest);
	if (rank == 0)
		printf("   bytes    min us   mean us    max us      MB/s\n");
	for (int size = 1; size <= largest; size *= 4) {
		int rounds = size > 65536 ? 50 : 1000;
		double least = 1e9, most = 0, total = 0;
		MPI_Barrier(MPI_COMM_WORLD);
		once(bytes, size);
		for (int round = 0; round < rounds; round++) {
			double took = once(bytes, size);
			least = took < least ? took : least;
			most = took > most ? took : most;
			total += took;
		}
		if (rank == 0)
			printf("%8d %9.2f %9.2f %9.2f %9.1f\n", size, least * 1e6, total / rounds * 1e6, most * 1e6, size * rounds / total / 1e6);
	}
	free(bytes);
	MPI_Finalize();
	return 0;
}

/* What MPI programs do not use of the provider, and what they cannot show: address vectors as map and table, IPv4 and IPv6,
 * descriptors to wait for, cancelled sends and receives, peers that die or use another version, a NIC that is missing.
 *
 * fabric full ADDRESS: opens endpoints on the NIC until it has no room.
 *
 * Prints one line for each test. Ends with 1 at the first check that does not hold. */
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			exit(1); \
		} \
	} while (0)

/* An endpoint with what belongs to it. */
struct side {
	struct fi_info *info;
	struct fid_fabric *fabric;
	struct fid_domain *domain;
	struct fid_av *av;
	struct fid_cq *cq;
	struct fid_ep *ep;
	char name[64];
	size_t length;
};

static int try_open(struct side *side, const char *node, enum fi_av_type type, enum fi_wait_obj wait)
{
	struct fi_info *hints = fi_allocinfo();
	struct fi_av_attr av = {.type = type};
	struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_TAGGED, .wait_obj = wait};
	hints->caps = FI_TAGGED | FI_DIRECTED_RECV | FI_SOURCE;
	hints->ep_attr->type = FI_EP_RDM;
	hints->domain_attr->av_type = type;
	hints->fabric_attr->prov_name = strdup("rmpp");
	memset(side, 0, sizeof *side);
	CHECK(!fi_getinfo(FI_VERSION(1, 17), node, NULL, FI_SOURCE, hints, &side->info));
	CHECK(!fi_fabric(side->info->fabric_attr, &side->fabric, NULL));
	CHECK(!fi_domain(side->fabric, side->info, &side->domain, NULL));
	CHECK(!fi_av_open(side->domain, &av, &side->av, NULL));
	CHECK(!fi_cq_open(side->domain, &cq, &side->cq, NULL));
	fi_freeinfo(hints);
	int result = fi_endpoint(side->domain, side->info, &side->ep, NULL);
	if (result)
		return result;
	CHECK(!fi_ep_bind(side->ep, &side->av->fid, 0));
	CHECK(!fi_ep_bind(side->ep, &side->cq->fid, FI_TRANSMIT | FI_RECV));
	CHECK(!fi_enable(side->ep));
	side->length = sizeof side->name;
	CHECK(!fi_getname(&side->ep->fid, side->name, &side->length));
	return 0;
}

static void end(struct side *side)
{
	if (side->ep)
		fi_close(&side->ep->fid);
	fi_close(&side->cq->fid);
	fi_close(&side->av->fid);
	fi_close(&side->domain->fid);
	fi_close(&side->fabric->fid);
	fi_freeinfo(side->info);
}

static fi_addr_t enter(struct side *side, const void *name)
{
	fi_addr_t address = FI_ADDR_UNSPEC;
	CHECK(fi_av_insert(side->av, name, 1, &address, 0, NULL) == 1 && address != FI_ADDR_UNSPEC);
	return address;
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Waits for one completion: 0 with an entry, or the error that it reports. `other` is driven meanwhile. */
static int complete(struct side *side, struct side *other, struct fi_cq_tagged_entry *entry)
{
	for (double begin = now(); now() < begin + 20;) {
		ssize_t got = fi_cq_read(side->cq, entry, 1);
		if (got == 1)
			return 0;
		if (got == -FI_EAVAIL) {
			struct fi_cq_err_entry error = {0};
			CHECK(fi_cq_readerr(side->cq, &error, 0) == 1);
			const char *text = fi_cq_strerror(side->cq, error.prov_errno, error.err_data, NULL, 0);
			CHECK(text && strlen(text) > 10 && fi_strerror(error.err));
			fprintf(stderr, "    %s: %s\n", fi_strerror(error.err), text);
			entry->op_context = error.op_context;
			return error.err;
		}
		CHECK(got == -FI_EAGAIN);
		if (other)
			fi_cq_read(other->cq, NULL, 0);
	}
	return FI_ENODATA;
}

/* Messages both ways between two endpoints of this process, short and long. */
static void exchange(const char *node, enum fi_av_type type)
{
	struct side a, b;
	CHECK(!try_open(&a, node, type, FI_WAIT_NONE) && !try_open(&b, node, type, FI_WAIT_NONE));
	fi_addr_t to_b = enter(&a, b.name), to_a = enter(&b, a.name);
	char looked_up[64], text[64];
	size_t length = sizeof looked_up, room = sizeof text;
	CHECK(!fi_av_lookup(a.av, to_b, looked_up, &length) && length == b.length && !memcmp(looked_up, b.name, length));
	CHECK(fi_av_straddr(a.av, b.name, text, &room) && strstr(text, node));
	for (size_t size = 1; size <= 1 << 20; size <<= 20) {
		char *out = malloc(size), *in = calloc(size, 1);
		struct fi_cq_tagged_entry entry;
		memset(out, 7, size);
		CHECK(!fi_trecv(b.ep, in, size, NULL, to_a, 5, 0, &in));
		CHECK(!fi_tsend(a.ep, out, size, NULL, to_b, 5, &out));
		CHECK(!complete(&b, &a, &entry) && entry.op_context == &in && entry.len == size && !memcmp(in, out, size));
		CHECK(!complete(&a, &b, &entry) && entry.op_context == &out);
		free(out);
		free(in);
	}
	fi_addr_t gone = to_b;
	CHECK(!fi_av_remove(a.av, &gone, 1, 0) && fi_av_lookup(a.av, to_b, looked_up, &length));
	end(&a);
	end(&b);
	printf("messages by %s, address %s\n", node, type == FI_AV_MAP ? "map" : "table");
}

/* A descriptor becomes readable when an operation completes, and fi_cq_sread() returns; the program does not poll meanwhile. */
static void waits(void)
{
	struct side a, b;
	CHECK(!try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_FD) && !try_open(&b, "127.0.0.1", FI_AV_TABLE, FI_WAIT_UNSPEC));
	fi_addr_t to_b = enter(&a, b.name), to_a = enter(&b, a.name);
	int descriptor = -1;
	char in = 0;
	struct fi_cq_tagged_entry entry;
	struct fid *queue = &a.cq->fid;
	CHECK(!fi_control(&a.cq->fid, FI_GETWAIT, &descriptor));
	struct pollfd ready = {.fd = descriptor, .events = POLLIN};
	CHECK(!fi_trecv(a.ep, &in, 1, NULL, to_b, 1, 0, &a));
	CHECK(!fi_trywait(a.fabric, &queue, 1) && poll(&ready, 1, 50) == 0);
	double begin = now();
	CHECK(fi_cq_sread(b.cq, &entry, 1, NULL, 100) == -FI_EAGAIN && now() - begin >= 0.099);
	CHECK(!fi_tinject(b.ep, "x", 1, to_a, 1));
	CHECK(poll(&ready, 1, 10000) == 1 && fi_cq_read(a.cq, &entry, 1) == 1 && in == 'x' && entry.op_context == &a);
	CHECK(!fi_trecv(b.ep, &in, 1, NULL, to_a, 2, 0, &b) && !fi_tinject(a.ep, "y", 1, to_b, 2));
	CHECK(fi_cq_sread(b.cq, &entry, 1, NULL, 10000) == 1 && in == 'y' && entry.op_context == &b);
	end(&a);
	end(&b);
	printf("descriptors and fi_cq_sread wait\n");
}

/* A peer in another process, whose address comes by a pipe. It sends one message, so that the endpoints know each other. */
static pid_t start_peer(struct side *side, fi_addr_t *address)
{
	int pipes[2][2];
	CHECK(!pipe(pipes[0]) && !pipe(pipes[1]));
	pid_t child = fork();
	if (child == 0) {
		struct side peer;
		char name[64];
		struct fi_cq_tagged_entry entry;
		CHECK(read(pipes[0][0], name, sizeof name) == sizeof name);
		CHECK(!try_open(&peer, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE));
		CHECK(write(pipes[1][1], peer.name, sizeof peer.name) == sizeof peer.name);
		char *large = calloc(1 << 20, 1);
		CHECK(!fi_tsend(peer.ep, large, 1 << 20, NULL, enter(&peer, name), 1, NULL));
		complete(&peer, NULL, &entry);
		pause();
	}
	char name[64], *in = malloc(1 << 20);
	struct fi_cq_tagged_entry entry;
	CHECK(write(pipes[0][1], side->name, sizeof name) == sizeof name && read(pipes[1][0], name, sizeof name) == sizeof name);
	*address = enter(side, name);
	CHECK(!fi_trecv(side->ep, in, 1 << 20, NULL, *address, 1, 0, NULL) && !complete(side, NULL, &entry));
	for (int at = 0; at < 4; at++)
		close(pipes[at / 2][at % 2]);
	free(in);
	return child;
}

/* A peer is killed: a receive that only it could match ends with an error, as does a long send to it. Others go on. */
static void deaths(void)
{
	struct side a;
	fi_addr_t peer;
	char in[8];
	static char out[1 << 20];
	struct fi_cq_tagged_entry entry;
	CHECK(!try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE));
	pid_t child = start_peer(&a, &peer);
	CHECK(!fi_trecv(a.ep, in, sizeof in, NULL, peer, 9, 0, &in));
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	double begin = now();
	CHECK(complete(&a, NULL, &entry) == FI_ETIMEDOUT && entry.op_context == &in && now() - begin < 10);
	CHECK(!fi_tsend(a.ep, out, sizeof out, NULL, peer, 9, &out));
	CHECK(complete(&a, NULL, &entry) == FI_ETIMEDOUT && entry.op_context == &out);
	child = start_peer(&a, &peer);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	end(&a);
	printf("a dead peer's receives and sends fail\n");
}

static void cancels(void)
{
	struct side a, b;
	struct fi_cq_tagged_entry entry;
	struct sockaddr_in nobody = {.sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	static char out[1 << 20], whole[1 << 20], in[8];
	CHECK(!try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE) && !try_open(&b, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE));
	fi_addr_t to_nobody = enter(&a, &nobody), to_b = enter(&a, b.name), to_a = enter(&b, a.name);
	CHECK(!fi_tsend(a.ep, out, sizeof out, NULL, to_nobody, 1, &out) && !fi_cancel(&a.ep->fid, &out));
	CHECK(complete(&a, NULL, &entry) == FI_ECANCELED && entry.op_context == &out);
	CHECK(!fi_trecv(b.ep, in, sizeof in, NULL, to_a, 1, 0, &in) && !fi_cancel(&b.ep->fid, &in));
	CHECK(complete(&b, NULL, &entry) == FI_ECANCELED && entry.op_context == &in);
	/* What was cancelled takes no message. */
	CHECK(!fi_tinject(a.ep, "z", 1, to_b, 1) && !fi_trecv(b.ep, in, sizeof in, NULL, to_a, 1, 0, &b));
	CHECK(!complete(&b, &a, &entry) && entry.op_context == &b && in[0] == 'z');
	/* What has ended is not found: a program may wait for the cancellation of what was. */
	CHECK(fi_cancel(&b.ep->fid, &b) == -FI_ENOENT);
	CHECK(!fi_tsend(a.ep, out, sizeof out, NULL, to_b, 2, &out) && !fi_trecv(b.ep, whole, sizeof whole, NULL, to_a, 2, 0, &whole));
	CHECK(!complete(&a, NULL, &entry) && entry.op_context == &out);
	CHECK(fi_cancel(&b.ep->fid, &whole) == -FI_ENOENT && !complete(&b, NULL, &entry) && entry.op_context == &whole);
	end(&a);
	end(&b);
	printf("sends and receives are cancelled\n");
}

/* CRC32C over both addresses, as docs/reference/rmpp.md has it, and a packet without body. */
static uint32_t checksum(const struct sockaddr_in *from, const struct sockaddr_in *to, const unsigned char *packet)
{
	unsigned char bytes[2 * 18 + 36] = {0};
	const struct sockaddr_in *ends[] = {from, to};
	uint32_t crc = ~0u;
	for (int end = 0; end < 2; end++) {
		memset(bytes + 18 * end + 10, 0xff, 2);
		memcpy(bytes + 18 * end + 12, &ends[end]->sin_addr, 4);
		memcpy(bytes + 18 * end + 16, &ends[end]->sin_port, 2);
	}
	memcpy(bytes + 36, packet, 36);
	for (size_t at = 0; at < sizeof bytes; at++) {
		crc ^= bytes[at];
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
	}
	return htonl(~crc);
}

/* A peer that answers every packet with its own, of the next version: a send to it ends with an error that says so. */
static void versions(void)
{
	struct side a;
	struct sockaddr_in peer = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, from;
	socklen_t length = sizeof peer;
	unsigned char packet[2048], swapped[4], own = 0;
	static char out[1 << 20];
	struct fi_cq_tagged_entry entry;
	int descriptor = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(!bind(descriptor, (void *)&peer, sizeof peer) && !getsockname(descriptor, (void *)&peer, &length));
	CHECK(!try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE));
	CHECK(!fi_tsend(a.ep, out, sizeof out, NULL, enter(&a, &peer), 1, &out));
	for (int turn = 0; turn < 2; turn++) {
		/* First its Hello, which is answered with our Hello of the next version; that it answers in its own. */
		struct pollfd ready = {.fd = descriptor, .events = POLLIN};
		while (!poll(&ready, 1, 10))
			fi_cq_read(a.cq, NULL, 0);
		CHECK(recvfrom(descriptor, packet, sizeof packet, 0, (void *)&from, &length) == 40);
		CHECK(turn ? packet[0] == own : (own = packet[0]) > 0);
		CHECK(packet[1] == (turn ? 12 : 8));
		memcpy(swapped, packet + 4, 4);
		memcpy(packet + 4, swapped + 2, 2);
		memcpy(packet + 6, swapped, 2);
		packet[0] = own + 1;
		*(uint32_t *)(packet + 36) = checksum(&peer, &from, packet);
		CHECK(turn || sendto(descriptor, packet, 40, 0, (void *)&from, sizeof from) == 40);
	}
	CHECK(complete(&a, NULL, &entry) == EPROTONOSUPPORT && entry.op_context == &out);
	close(descriptor);
	end(&a);
	printf("a peer of another version is an error\n");
}

/* With FI_RMPP_NIC=always and no agent there is no endpoint; otherwise this host takes the NIC's place. */
static void without_nic(void)
{
	struct side a;
	setenv("BATON_SOCKET", "/nonexistent", 1);
	setenv("FI_RMPP_NIC", "always", 1);
	CHECK(try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE) == -FI_ENODEV);
	end(&a);
	setenv("FI_RMPP_NIC", "auto", 1);
	CHECK(!try_open(&a, "127.0.0.1", FI_AV_TABLE, FI_WAIT_NONE));
	end(&a);
	printf("no NIC: an error, or this host in its place\n");
}

/* Opens some endpoints in a process of its own, which has them until the other end of `hold` is closed. Returns what the last
 * fi_endpoint() did. */
static int open_elsewhere(const char *address, const int *hold)
{
	enum { EACH = 6 };
	struct side sides[EACH];
	int answer[2], result = 0;
	char end;
	CHECK(!pipe(answer));
	if (!fork()) {
		close(hold[1]);
		for (int at = 0; at < EACH && !result; at++)
			result = try_open(&sides[at], address, FI_AV_TABLE, FI_WAIT_NONE);
		CHECK(write(answer[1], &result, sizeof result) == sizeof result);
		_exit(read(hold[0], &end, 1) != 0);
	}
	close(answer[1]);
	CHECK(read(answer[0], &result, sizeof result) == sizeof result);
	close(answer[0]);
	return result;
}

/* A NIC without room is an error of FI_RMPP_NIC=always, and otherwise this host takes its place. Who ends makes room. */
static void full(const char *address)
{
	struct side side;
	int hold[2], count = 0, result = 0;
	setenv("FI_RMPP_NIC", "always", 1);
	CHECK(!pipe(hold));
	for (; count < 200 && !result; count++)
		result = open_elsewhere(address, hold);
	printf("full: %s\n", fi_strerror(-result));
	CHECK(result == -FI_ENODEV && count > 1);
	setenv("FI_RMPP_NIC", "auto", 1);
	CHECK(!try_open(&side, address, FI_AV_TABLE, FI_WAIT_NONE));
	end(&side);
	setenv("FI_RMPP_NIC", "always", 1);
	close(hold[1]);
	while (wait(NULL) > 0)
		;
	/* The agent closes a session when it sees that its program has ended. */
	/* Waits: between two tries; the agent reports it to nobody. */
	for (double begin = now(); (result = try_open(&side, address, FI_AV_TABLE, FI_WAIT_NONE)); usleep(1000)) {
		end(&side);
		CHECK(now() - begin < 10);
	}
	end(&side);
	printf("a full NIC: this host in its place, and room again\n");
}

int main(int count, char **arguments)
{
	setenv("FI_RMPP_DEAD_MS", "700", 1);
	if (count == 3 && !strcmp(arguments[1], "full")) {
		full(arguments[2]);
		return 0;
	}
	without_nic();
	exchange("127.0.0.1", FI_AV_TABLE);
	exchange("127.0.0.1", FI_AV_MAP);
	exchange("::1", FI_AV_TABLE);
	waits();
	cancels();
	versions();
	deaths();
	return 0;
}

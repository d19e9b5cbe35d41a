/* Accepts one connection, echoes what arrives until the peer closes, and moves the
 * connection to the NIC or back after every kilobyte. argv: path of the agent's socket.
 * The listener is descriptor 3. Prints how often the connection moved. With a second
 * argument it receives into posted buffers and sends from buffers, and prints how many bytes the
 * NIC put there. */
#define _GNU_SOURCE
#include <baton.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(call) do { if ((call) < 0) { fprintf(stderr, "%s: %s (%s)\n", #call, baton_error(), strerror(errno)); return 1; } } while (0)

static int posts;
static size_t by_nic;
/* Sends from buffers that have not been released. */
static size_t parts;

/* Like baton_receive(), through buffers, four of which are posted at any time. */
static ssize_t receive(baton_session *s, int c, char *bytes, size_t length)
{
    static int posted;
    size_t got, placed;
    if (!posts) return baton_receive(s, c, bytes, length);
    for (; posted < 4; posted++) {
        baton_buffer *buffer = baton_buffer_new(s, 700);
        if (buffer == NULL || baton_post(s, c, buffer) < 0) return -1;
    }
    baton_buffer *buffer = baton_take_posted(s, c, &got, &placed);
    if (buffer == NULL) return -1;
    posted--;
    memcpy(bytes, baton_buffer_bytes(buffer), got);
    baton_buffer_free(buffer);
    by_nic += placed;
    return got;
}

/* Like baton_send(), through a buffer, which is freed at once: its memory stays as it is until the peer has it. */
static ssize_t send_bytes(baton_session *s, int c, const char *bytes, size_t length)
{
    if (!posts) return baton_send(s, c, bytes, length);
    baton_buffer *buffer = baton_buffer_new(s, length);
    if (buffer == NULL) return -1;
    memcpy(baton_buffer_memory(buffer), bytes, length);
    ssize_t sent = baton_send_buffer(s, c, buffer, 0, length);
    int error = errno;
    baton_buffer_free(buffer);
    if (sent > 0) parts++;
    int released = baton_take_sent(s, c);
    if (released < 0) return -1;
    parts -= released;
    errno = error;
    return sent;
}

static int echo(baton_session *s, int c)
{
    static char bytes[65536];
    size_t held = 0, done = 0, since = 0, moves = 0;
    int ended = 0, place = BATON_KERNEL;
    while (!ended || done < held) {
        ssize_t n;
        if (done == held && !ended) {
            n = receive(s, c, bytes, sizeof bytes);
            if (n > 0) { held = n; done = 0; since += n; }
            else if (n == 0) ended = 1;
            else if (errno != EAGAIN) CHECK(n);
        }
        while (done < held && (n = send_bytes(s, c, bytes + done, held - done)) >= 0) done += n;
        if (done < held && errno != EAGAIN) CHECK(-1);
        /* With buffers it stays in place for a while, so that bytes arrive after they are posted and not during a move. */
        if (since >= (posts ? 50000 : 1024)) {
            place = place == BATON_KERNEL ? BATON_NIC : BATON_KERNEL;
            int moved = baton_move(s, c, place);
            if (moved == 0) { moves++; since = 0; }
            else if (errno == EAGAIN) place = place == BATON_KERNEL ? BATON_NIC : BATON_KERNEL;
            else CHECK(moved);
        } else {
            uint32_t ready[4];
            CHECK(baton_poll(s, 5, ready, 4));
        }
    }
    /* The peer acknowledges all of it. */
    while (parts > 0) {
        uint32_t ready[4];
        int released = baton_take_sent(s, c);
        CHECK(released);
        parts -= released;
        CHECK(baton_poll(s, 5, ready, 4));
    }
    int value = 0;
    CHECK(baton_set_option(s, c, 6, 1, 1));
    CHECK(baton_get_option(s, c, 6, 1, &value));
    if (value != 1) return fprintf(stderr, "TCP_NODELAY is %d\n", value), 1;
    /* On a system without nodes the node is unknown. */
    if (baton_node(s, c) < 0 && errno != ENODATA) CHECK(-1);
    CHECK(baton_get_option(s, c, SOL_SOCKET, SO_INCOMING_CPU, &value));
    if (value < 0) return fprintf(stderr, "SO_INCOMING_CPU is %d\n", value), 1;
    CHECK(baton_shutdown(s, c));
    CHECK(baton_close(s, c));
    printf("%zu %zu\n", moves, by_nic);
    return 0;
}

int main(int argc, char **argv)
{
    posts = argc > 2;
    if (baton_open("/nowhere/agent.sock") != NULL || strstr(baton_error(), "no agent at") == NULL) {
        fprintf(stderr, "an agent that is not there was found: %s\n", baton_error());
        return 1;
    }
    baton_session *s = baton_open(argc > 1 ? argv[1] : NULL);
    if (s == NULL) return fprintf(stderr, "%s\n", baton_error()), 1;
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) < 0) return 1;
    if (baton_adopt(s, pair[0]) != -1) return fprintf(stderr, "a Unix socket was adopted\n"), 1;
    if (baton_send(s, 99, "x", 1) != -1 || errno != EBADF) return fprintf(stderr, "connection 99 exists\n"), 1;
    int fd = accept4(3, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return perror("accept"), 1;
    int c = baton_adopt(s, fd);
    CHECK(c);
    int result = echo(s, c);
    baton_end(s);
    return result;
}

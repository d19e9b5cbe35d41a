/* libbaton: a program's side of Baton, for C.
 *
 * A session belongs to one thread. It adopts TCP connections that the program
 * has accepted or connected. From then on they are used through these calls,
 * which work the same wherever a connection is: in the kernel or on the NIC.
 * The program needs no privilege.
 *
 * Calls that fail return -1 (or NULL) and set errno; baton_error() then returns
 * a message that says what happened and what to do. EAGAIN means: not now, wait
 * with baton_poll() and try again, as with a non-blocking socket.
 *
 *     baton_session *s = baton_open(NULL);
 *     int c = baton_adopt(s, accept4(listener, NULL, NULL, SOCK_NONBLOCK));
 *     baton_move(s, c, BATON_NIC);
 *     for (uint32_t ready[16]; (n = baton_poll(s, -1, ready, 16)) >= 0; ) ...
 *
 * Link with -lbaton. Licence: MIT OR Apache-2.0.
 */
#ifndef BATON_H
#define BATON_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct baton_session baton_session;

/* Where a connection is, or is to go. */
enum baton_place { BATON_KERNEL = 0, BATON_NIC = 1, BATON_MOVING = 2 };

/* Opens a session with the agent that listens at PATH. NULL stands for the path
 * in the environment variable BATON_SOCKET, or else for /run/baton/agent.sock.
 * Returns NULL if no agent listens there. */
baton_session *baton_open(const char *path);

/* Ends a session: its connections return to the kernel, their descriptors are
 * closed. */
void baton_end(baton_session *session);

/* Adopts a connected, non-blocking TCP socket, which stays in the kernel until it
 * is moved. Returns the connection's number. The descriptor is Baton's from here
 * on, and is closed if this fails, but for EAGAIN: the agent does not answer now,
 * the descriptor is the program's as before, and may be adopted later. EOPNOTSUPP:
 * this connection can never be moved (not TCP, MPTCP, signed, ...). */
int baton_adopt(baton_session *session, int fd);

/* Moves a connection and waits until the move is done. On an error the connection
 * stays where it was. EAGAIN: trying again may help. EOPNOTSUPP: it will not. */
int baton_move(baton_session *session, int connection, enum baton_place to);

/* Where a connection is: a value of enum baton_place. */
int baton_place(baton_session *session, int connection);

/* Like send(2) and recv(2) on a non-blocking socket, without flags.
 * baton_receive() returns 0 at the end of the stream. */
ssize_t baton_send(baton_session *session, int connection, const void *bytes, size_t length);
ssize_t baton_receive(baton_session *session, int connection, void *bytes, size_t length);

/* Receiving without a copy by the program: buffers in memory that the NIC can
 * write. The bytes received next go into the posted buffers, in order. While the
 * connection is on the NIC, the NIC puts them there itself; otherwise they are
 * copied. Until a posted buffer is taken back it must not be used or freed, and
 * baton_receive() fails with EINVAL.
 *
 * baton_buffer_new() returns NULL with ENOMEM if the session has no room left for
 * buffers; baton_receive() needs none. baton_post() takes the buffer over, whether
 * it fails or not. baton_take_posted() returns the first posted buffer once it is
 * full (NULL with EAGAIN until then). *LENGTH is the number of bytes received into
 * it, less than its length only at the end of the stream; *PLACED (unless PLACED
 * is NULL) is how many of them the NIC has put there itself. Free all buffers
 * before their session ends. */
typedef struct baton_buffer baton_buffer;
baton_buffer *baton_buffer_new(baton_session *session, size_t length);
const void *baton_buffer_bytes(const baton_buffer *buffer);
void baton_buffer_free(baton_buffer *buffer);
int baton_post(baton_session *session, int connection, baton_buffer *buffer);
baton_buffer *baton_take_posted(baton_session *session, int connection, size_t *length, size_t *placed);

/* Sending without a copy by the program: queues LENGTH bytes of a buffer from
 * OFFSET on, or as many as there is room for, and returns how many: one part. While
 * the connection is on the NIC, the NIC takes them from the buffer until the peer
 * has acknowledged them; otherwise, and while seven parts are unacknowledged, they
 * are copied. They must stay as they are until baton_take_sent() has counted the
 * part: it returns how many parts, in their order, nobody needs any more since it
 * was last called. One buffer may be sent on many connections; it may be freed
 * at any time. baton_buffer_memory() is where to write. EINVAL: no such bytes. */
void *baton_buffer_memory(baton_buffer *buffer);
ssize_t baton_send_buffer(baton_session *session, int connection, const baton_buffer *buffer,
                          size_t offset, size_t length);
int baton_take_sent(baton_session *session, int connection);

/* Like shutdown(2) with SHUT_WR. */
int baton_shutdown(baton_session *session, int connection);

/* Integer socket options. They take effect wherever the connection is. */
int baton_set_option(baton_session *session, int connection, int level, int option, int value);
int baton_get_option(baton_session *session, int connection, int level, int option, int *value);

/* The NUMA node of the processor that processes the connection's frames, in the
 * kernel or on the NIC (the processor itself: SO_INCOMING_CPU). A thread that runs
 * on that node has the data near. ENODATA if the node is unknown. */
int baton_node(baton_session *session, int connection);

/* baton_poll() also ends when this descriptor, such as a listener, becomes
 * readable. */
int baton_watch(baton_session *session, int fd);

/* Waits up to TIMEOUT milliseconds (-1: for ever) for connections that may have
 * become readable or writable, and writes up to COUNT of their numbers. Returns
 * how many. Use each until it returns EAGAIN, as with edge-triggered epoll. */
int baton_poll(baton_session *session, int timeout, uint32_t *ready, size_t count);

/* Returns the descriptor to the program: the connection is in the kernel and no
 * longer Baton's. */
int baton_release(baton_session *session, int connection);

/* Closes a connection as close(2) would. */
int baton_close(baton_session *session, int connection);

/* The message of the last call on this thread that failed. Never NULL; valid
 * until the next failing call on this thread. */
const char *baton_error(void);

#ifdef __cplusplus
}
#endif

#endif

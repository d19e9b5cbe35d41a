"""Behaviour of a socket: every situation with every operation, and every way to wait for events. One line of JSON per case.
Each case is played with one version of IP, drawn from BATON_FUZZ_SEED (1); with both if BATON_EVERY_CASE is set.

Usage: conformance.py COLUMN FAMILY FILE [HOST PEERS NAMESPACE]. The column is where the connection is: `kernel`, `nic`, `moved` (in
the kernel until the situation is reached, then on the NIC for the operation, then in the kernel again), `returned` (the other way
round), or `made` (on the NIC, which makes it). Moves are requested on the standard output, and answered on the standard input.

Listener and peers are on the loopback address, or the listener at HOST, and the peers on another host, at PEERS in NAMESPACE (a file).
"""

import array
import ctypes
import errno
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import tempfile
import termios

column, family, output = sys.argv[1:4]
kind, loopback = (socket.AF_INET, "127.0.0.1") if family == "4" else (socket.AF_INET6, "::1")
host, peers, namespace = sys.argv[4:] or (loopback, loopback, "/proc/thread-self/ns/net")
SEED = os.environ.get("BATON_FUZZ_SEED", "1")
EVERY = "BATON_EVERY_CASE" in os.environ
PATIENCE = 5000
CLONE_NEWNET = 0x40000000

libc = ctypes.CDLL(None, use_errno=True)

listener = socket.socket(kind)
listener.bind((host, 0))
listener.listen(16)
port = listener.getsockname()[1]

plain = tempfile.TemporaryFile()
plain.write(bytes(range(100)))
plain.flush()


here, there = (os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in ("/proc/thread-self/ns/net", namespace))


def go_to(network):
    """Moves to a host: the sockets that are made then are that host's."""
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def connect():
    """The peer's socket, connected to the listener."""
    go_to(there)
    try:
        peer = socket.socket(kind)
    finally:
        go_to(here)
    peer.connect((host, port))
    return peer


def wait_for_nic():
    """Connects until the NIC makes the listener's connections, which it does some time after the program has first waited for one."""
    # Waits: until the NIC makes them.
    for _ in range(1000):
        p = connect()
        s, _ = listener.accept()
        s.close()
        p.close()
        print("MADE", flush=True)
        if int(sys.stdin.readline()) > 0:
            return
    raise SystemExit("the NIC makes no connections")


def place(where):
    """Moves the connection."""
    print("PLACE", where, port, flush=True)
    answer = sys.stdin.readline().strip()
    if answer != "ok":
        raise SystemExit(f"{where}: {answer}")


def at_start():
    if column in ("nic", "returned"):
        place("nic")


def between(first):
    if column == "moved":
        place("nic" if first else "kernel")
    elif column == "returned":
        place("kernel" if first else "nic")


def wait(sock, events):
    """Waits for what is in flight, so that it has arrived afterwards in every column."""
    poll = select.poll()
    poll.register(sock, events)
    poll.poll(PATIENCE)


def until_processed():
    """Waits until the kernel has finished with each frame that it had begun to receive: receiving is in an RCU read section, and this
    waits for those to end. The wake-up, which is the edge, comes after what it announces can be seen; a reset wakes twice."""
    SYS_MEMBARRIER, GLOBAL = 324, 1
    libc.syscall(SYS_MEMBARRIER, GLOBAL, 0, 0)


def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Situations: events that the socket (s) and its peer (p) have been through.


def nothing(s, p):
    pass


def few(s, p):
    p.send(b"abcde")
    wait(s, select.POLLIN)


def many(s, p):
    p.send(bytes(range(200)))
    wait(s, select.POLLIN)
    while pending(s) < 200:
        wait(s, select.POLLIN)


def end(s, p):
    p.shutdown(socket.SHUT_WR)
    wait(s, select.POLLRDHUP)


def few_and_end(s, p):
    p.send(b"abcde")
    end(s, p)


def was_reset(s, p):
    reset(p)
    wait(s, 0)


def few_and_reset(s, p):
    few(s, p)
    reset(p)
    wait(s, 0)


def half_shut(s, p):
    s.shutdown(socket.SHUT_WR)
    wait(p, select.POLLRDHUP)


def both_shut(s, p):
    half_shut(s, p)
    end(s, p)


def half_shut_with_few(s, p):
    half_shut(s, p)
    few(s, p)


def full(s, p):
    piece = b"z" * 65536
    try:
        while True:
            s.send(piece, socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass


SITUATIONS = [nothing, few, many, end, few_and_end, was_reset, few_and_reset, half_shut, both_shut, half_shut_with_few, full]


def pending(s):
    count = array.array("i", [0])
    fcntl.ioctl(s, termios.FIONREAD, count)
    return count[0]


def raw_recv(s, length, flags):
    """recv with flags that Python's own would interpret, or lengths that it would not pass on."""
    buffer = ctypes.create_string_buffer(max(length, 1))
    got = libc.recv(s.fileno(), buffer, ctypes.c_size_t(length), flags)
    return [got, errno.errorcode.get(ctypes.get_errno()) if got < 0 else buffer.raw[:max(got, 0)].hex() if got <= length else got]


def readv(s):
    first, second = bytearray(3), bytearray(50)
    got = os.readv(s.fileno(), [first, second])
    return [got, (first + second)[:got].hex()]


def receive_message(s):
    data, ancillary, flags, _ = s.recvmsg(4)
    return [data.hex(), len(ancillary), flags]


def receive_into(s):
    buffer = bytearray(8)
    return [s.recv_into(buffer), buffer.hex()]


def receive_twice(s):
    return [s.recv(2).hex(), s.recv(2).hex()]


def peek_twice(s):
    return [s.recv(3, socket.MSG_PEEK).hex(), s.recv(100, socket.MSG_PEEK).hex(), pending(s)]


def receive_in_time(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20000))
    os.set_blocking(s.fileno(), True)
    try:
        return os.read(s.fileno(), 100).hex()
    finally:
        os.set_blocking(s.fileno(), False)


def receive_all_in_time(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 20000))
    os.set_blocking(s.fileno(), True)
    try:
        return raw_recv(s, 50, socket.MSG_WAITALL)
    finally:
        os.set_blocking(s.fileno(), False)


def sent(count, wanted):
    return "all" if count == wanted else count


def send_much_in_time(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 20000))
    os.set_blocking(s.fileno(), True)
    try:
        return sent(os.write(s.fileno(), b"q" * 1000), 1000)
    finally:
        os.set_blocking(s.fileno(), False)


def send_a_file(s):
    return sent(os.sendfile(s.fileno(), plain.fileno(), 0, 100), 100)


def through_a_copy(s):
    copy = s.dup()
    copy.setblocking(False)
    try:
        return copy.recv(3).hex()
    finally:
        copy.close()


def lowat(s):
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 50)
    return s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def options(s):
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
    return [s.getsockopt(socket.IPPROTO_TCP, name) for name in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE)] + [
        s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    ]


def is_corked(s):
    return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK)


def cork(s):
    seen = []
    for on in (1, 0, 1):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)
        seen.append(is_corked(s))
    return seen


def names(s):
    return [s.getsockname()[0] == host, s.getsockname()[1] == port, s.getpeername()[0] == peers]


def state(s):
    number = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    # FIN-WAIT-1 becomes FIN-WAIT-2 whenever the peer's acknowledgement arrives.
    return 4 if number == 5 else number


def the_error_twice(s):
    return [s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]


OPERATIONS = {
    "nothing": lambda s: None,
    "recv": lambda s: s.recv(100).hex(),
    "recv 2": receive_twice,
    "recv nothing": lambda s: raw_recv(s, 0, 0),
    "recv MSG_PEEK": peek_twice,
    "recv MSG_TRUNC": lambda s: raw_recv(s, 4, socket.MSG_TRUNC),
    "recv MSG_DONTWAIT": lambda s: raw_recv(s, 7, socket.MSG_DONTWAIT),
    "recv with time-out": receive_in_time,
    "recv MSG_WAITALL with time-out": receive_all_in_time,
    "recv MSG_OOB": lambda s: raw_recv(s, 1, socket.MSG_OOB),
    "recv MSG_ERRQUEUE": lambda s: raw_recv(s, 1, socket.MSG_ERRQUEUE),
    "recv_into": receive_into,
    "recvmsg": receive_message,
    "read": lambda s: os.read(s.fileno(), 3).hex(),
    "readv": readv,
    "FIONREAD": pending,
    "send": lambda s: sent(s.send(b"0123456789"), 10),
    "send nothing": lambda s: s.send(b""),
    "sendmsg": lambda s: sent(s.sendmsg([b"abc", b"", b"defg"]), 7),
    "write": lambda s: sent(os.write(s.fileno(), b"w" * 300), 300),
    "writev": lambda s: sent(os.writev(s.fileno(), [b"w", b"v"]), 2),
    "write with time-out": send_much_in_time,
    "sendfile": send_a_file,
    "send MSG_MORE": lambda s: sent(s.send(b"more", socket.MSG_MORE), 4),
    "shutdown RD": lambda s: s.shutdown(socket.SHUT_RD),
    "shutdown WR": lambda s: s.shutdown(socket.SHUT_WR),
    "shutdown RDWR": lambda s: s.shutdown(socket.SHUT_RDWR),
    "dup": through_a_copy,
    "SO_RCVLOWAT": lowat,
    "options": options,
    "TCP_CORK": cork,
    "names": names,
    "TCP_INFO": state,
    "SO_ERROR": the_error_twice,
    "connect": lambda s: s.connect((host, port)),
    "listen": lambda s: s.listen(1),
}


def attempt(operation, s):
    try:
        return operation(s)
    except OSError as error:
        return errno.errorcode.get(error.errno, error.errno)


# Ways to wait for events of a socket: each returns the present events, as a number or as lists. `room` says whether an event for
# room may be reported: where it depends on sizes of buffers it must not, since it would disarm EPOLLONESHOT, and be an edge.


def by_select(s, room):
    return lambda: [len(found) for found in select.select([s], [s], [s], 0)]


def by_poll(s, room):
    poll = select.poll()
    poll.register(s, select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDHUP)
    return lambda: [events for _, events in poll.poll(0)]


def by_epoll(flags):
    def watch(s, room):
        epoll = select.epoll()
        of_room = select.EPOLLOUT if room else 0
        epoll.register(s, select.EPOLLIN | of_room | select.EPOLLPRI | select.EPOLLRDHUP | flags)
        return lambda: [events for _, events in epoll.poll(0)]

    return watch


WATCHES = {
    "select": by_select,
    "poll": by_poll,
    "epoll": by_epoll(0),
    "oneshot": by_epoll(select.EPOLLONESHOT),
    "edge": by_epoll(select.EPOLLET),
}


def from_the_peer(p):
    """What the peer has received in the end: how many bytes, and how the stream ended."""
    total = 0
    p.setblocking(False)
    try:
        while True:
            wait(p, select.POLLIN)
            got = p.recv(1 << 20)
            if not got:
                return [total, "end"]
            total += len(got)
    except BlockingIOError:
        return [total, "open"]
    except OSError as error:
        return [total, errno.errorcode[error.errno]]


def case(situation, operation, watch):
    p = connect()
    s, _ = listener.accept()
    s.setblocking(False)
    at_start()
    seen = watch(s, situation is not full)
    results = []
    situation(s, p)
    if watch is WATCHES["edge"]:
        until_processed()
    results.append(seen())
    between(True)
    results.append(attempt(operation, s))
    results.append(seen())
    between(False)
    results.append(seen())
    results.append(attempt(is_corked, s))
    # The rest of the connection must still work.
    results.append(attempt(lambda s: s.recv(1000).hex(), s))
    if situation is not full:
        results.append(attempt(lambda s: sent(s.send(b"last"), 4), s))
    results.append(seen())
    s.close()
    if p.fileno() >= 0 and situation is not full:
        results.append(from_the_peer(p))
    p.close()
    return results


def is_drawn(what):
    """Whether the case is played with this version of IP: the same in every column."""
    return EVERY or (random.Random(f"{SEED} {what}").random() < 0.5) == (family == "4")


def may_be_acknowledged_meanwhile(situation, name):
    """Whether the peer acknowledges a FIN while the socket is watched: that causes an edge whenever it arrives. On loopback that is
    before the end of the call that sends the FIN."""
    if len(sys.argv) > 4 and situation is both_shut:
        return True
    shuts = name in ("shutdown WR", "shutdown RDWR") and situation is not both_shut
    return shuts or situation in (half_shut, half_shut_with_few)


def without_room(result):
    """Buffers of kernel and NIC grow at different moments, so whether there is room is not compared."""
    if isinstance(result, list) and len(result) == 3:
        return [result[0], 0, result[2]]
    if isinstance(result, list) and len(result) == 1 and isinstance(result[0], int):
        return [result[0] & ~select.POLLOUT] if result[0] & ~select.POLLOUT else []
    return "some" if result in ("all", "EAGAIN") or isinstance(result, int) else result


if column == "made":
    wait_for_nic()
with open(output, "w") as lines:
    for situation in SITUATIONS:
        for name, operation in OPERATIONS.items():
            for way, watch in WATCHES.items():
                if way == "edge" and may_be_acknowledged_meanwhile(situation, name):
                    continue
                what = f"{situation.__name__}: {name}, {way}"
                if not is_drawn(what):
                    continue
                results = case(situation, operation, watch)
                if situation is full:
                    results = [without_room(result) for result in results]
                json.dump([what, results], lines)
                lines.write("\n")

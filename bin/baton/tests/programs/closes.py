"""A server that echoes, and closes a connection in the way that the client's line says: `close`, `unread`, `shutdown`, `late` (shut down at
once, closed when a line is read from standard input), `linger` or `exit`. It watches its connections with epoll, and fails if that
reports a closed one. It prints its port, and `closed` when it has closed a connection.
"""

import os
import select
import socket
import struct
import sys


def send_all(sock, data):
    while data:
        select.select([], [sock], [])
        data = data[sock.send(data) :]


listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(16)
print(listener.getsockname()[1], flush=True)
epoll = select.epoll()
epoll.register(listener, select.EPOLLIN)
open_ones = {}

while True:
    for fd, events in epoll.poll():
        if fd == listener.fileno():
            sock, _ = listener.accept()
            # A blocking socket's connection would stay in the kernel.
            sock.setblocking(False)
            open_ones[sock.fileno()] = sock
            epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
            continue
        if fd not in open_ones:
            sys.exit(f"an event of a socket that was closed: {events:#x}")
        sock = open_ones[fd]
        try:
            line = sock.recv(4096)
        except BlockingIOError:
            continue
        what = line.split(b"\n")[-2].decode() if b"\n" in line else ""
        if what == "unread":
            # Bytes that arrive now are not read.
            print("reading no more", flush=True)
            sys.stdin.readline()
        elif what == "linger":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif what in ("shutdown", "late"):
            send_all(sock, b"x" * 100000)
            sock.shutdown(socket.SHUT_WR)
            if what == "late":
                sys.stdin.readline()
            continue
        elif what == "exit":
            send_all(sock, b"x" * 100000)
            os._exit(0)
        elif what == "close":
            send_all(sock, b"x" * 100000)
        elif line:
            send_all(sock, line)
            continue
        del open_ones[fd]
        sock.close()
        print("closed", flush=True)

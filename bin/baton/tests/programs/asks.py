"""Reads options and addresses of sockets again and again while their connections move: they must not change. Prints the ports
of their peers, and goes on until a line comes."""

import select
import socket
import sys

SOCKET, IP, TCP = socket.SOL_SOCKET, socket.IPPROTO_IP, socket.IPPROTO_TCP
# Reuse, keep-alive, linger, reuse of the port, error, type, inlining, buffers, priority, ...
OPTIONS = [(SOCKET, 2), (SOCKET, 9), (SOCKET, 13), (SOCKET, 15), (SOCKET, 4), (SOCKET, 3), (SOCKET, 10), (SOCKET, 12), (SOCKET, 18)]
OPTIONS += [(TCP, 1), (TCP, 3), (TCP, 4), (IP, 1), (IP, 2)]


def state(end):
    return [end.getsockopt(*option) for option in OPTIONS], end.getsockname(), end.getpeername()


listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
for end in (client, server):
    end.setsockopt(SOCKET, socket.SO_REUSEADDR, 1)
    end.setsockopt(SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(TCP, socket.TCP_KEEPIDLE, 77)
expected = [state(end) for end in (client, server)]
print(*(end.getpeername()[1] for end in (client, server)), flush=True)
rounds = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for end, known in zip((client, server), expected):
        seen = state(end)
        if seen != known:
            sys.exit(f"round {rounds}: {[pair for pair in zip(OPTIONS, seen[0], known[0]) if pair[1] != pair[2]] or seen[1:]}")
    rounds += 1
    if rounds % 50 == 0:
        client.sendall(b"x")
        assert server.recv(1) == b"x"

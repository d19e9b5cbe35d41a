"""Exchanges messages with itself, one end in the kernel: messages of several sizes, each sent in one call, of one or of several buffers.
Prints the 90th percentile of a round trip in microseconds. Nagle's algorithm is on, so a message that leaves in two small segments waits
for the peer's delayed acknowledgement.
"""

import os
import socket
import sys
import threading
import time

listener = socket.create_server(("127.0.0.1", 0))


def receive(sock, length):
    got = 0
    while got < length:
        piece = sock.recv(1 << 20)
        assert piece
        got += len(piece)


def serve():
    sock, _ = listener.accept()
    for size, pieces in rounds():
        receive(sock, size)
        os.writev(sock.fileno(), [bytes(size // pieces)] * pieces) if pieces > 1 else sock.sendall(bytes(size))


def rounds():
    for number in range(400):
        yield 48_000, 1 + number % 4


# The connecting end stays in the kernel.
thread = threading.Thread(target=serve)
thread.start()
client = socket.create_connection(listener.getsockname())
times = []
for size, _ in rounds():
    start = time.perf_counter()
    client.sendall(bytes(size))
    receive(client, size)
    times.append(time.perf_counter() - start)
thread.join()
print(int(sorted(times)[len(times) * 9 // 10] * 1e6))

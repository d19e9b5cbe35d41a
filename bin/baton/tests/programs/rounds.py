"""Exchanges messages with itself, one end in the kernel: messages of several sizes, each sent in one call, of one or of several buffers.
Prints how many acknowledgements the kernel delayed until its timer expired. Nagle's algorithm is on, so a message that leaves in two small
segments waits for such a one. Usage: rounds.py ROUNDS
"""

import os
import socket
import sys
import threading

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


def delayed():
    """Acknowledgements that the timer for delayed ones has sent, in this network namespace."""
    names, numbers = (line.split() for line in open("/proc/self/net/netstat") if line.startswith("TcpExt:"))
    return int(numbers[names.index("DelayedACKs")])


def rounds():
    for number in range(int(sys.argv[1])):
        yield 48_000, 1 + number % 4


# The connecting end stays in the kernel.
thread = threading.Thread(target=serve)
thread.start()
client = socket.create_connection(listener.getsockname())
before = delayed()
for size, _ in rounds():
    client.sendall(bytes(size))
    receive(client, size)
after = delayed()
thread.join()
print(after - before)

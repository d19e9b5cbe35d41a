"""A forking server and its client. Children end, and a timer ticks, while the parent accepts and forks: calls that signals interrupt are
restarted."""
import os
import signal
import socket
import sys
import time

SECONDS = float(sys.argv[1])


def exactly(connection, length):
    got = b""
    while len(got) < length:
        piece = connection.recv(length - len(got))
        if not piece:
            sys.exit(f"the stream ended after {len(got)} of {length} bytes")
        got += piece
    return got


def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def tick():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)


def serve(connection):
    tick()
    connection.sendall(b"greeting")
    for _ in range(3):
        connection.sendall(exactly(connection, 100)[::-1])
    os._exit(0)


def server(listener):
    signal.signal(signal.SIGCHLD, reap)
    tick()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            serve(connection)
        connection.close()


listener = socket.create_server(("127.0.0.1", 0))
address = listener.getsockname()
child = os.fork()
if child == 0:
    server(listener)
listener.close()
count, end = 0, time.monotonic() + SECONDS
while time.monotonic() < end:
    with socket.create_connection(address) as connection:
        request = count.to_bytes(4, "big") * 25
        connection.sendall(request)
        assert exactly(connection, 8) == b"greeting"
        assert exactly(connection, 100) == request[::-1]
        for _ in range(2):
            connection.sendall(request)
            assert exactly(connection, 100) == request[::-1]
    count += 1
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)
print(count)

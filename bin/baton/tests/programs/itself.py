"""A program that exchanges bytes with itself over loopback, in every way that Python has: blocking sockets in threads, select, poll, epoll, asyncio.

Every byte that comes back is compared. Usage: itself.py SECONDS FAMILY WAY; with "-" for
the seconds it goes on until its standard input ends.
"""

import asyncio
import os
import select
import selectors
import socket
import sys
import threading
import time

seconds, family, way = sys.argv[1:4]
address = ("127.0.0.1", 0) if family == "4" else ("::1", 0)
kind = socket.AF_INET if family == "4" else socket.AF_INET6
PAIRS = 3


def lengths():
    n = 0
    while True:
        yield 1 + n * 7919 % 60000
        n += 1


def listener():
    sock = socket.socket(kind)
    sock.bind(address)
    sock.listen(16)
    return sock


def ask(sock, over):
    rounds = 0
    for length in lengths():
        if over.is_set():
            break
        data = os.urandom(length)
        sock.sendall(data)
        back = b""
        while len(back) < length:
            piece = sock.recv(100000)
            assert piece, "the connection has ended"
            back += piece
        assert back == data, "wrong bytes"
        rounds += 1
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b"", "bytes behind the end"
    sock.close()
    print("rounds", rounds)


def clients(port_of):
    over, failed = threading.Event(), []

    def end():
        if seconds == "-":
            sys.stdin.read()
        else:
            # Waits: as long as it was asked to go on.
            time.sleep(float(seconds))
        over.set()

    threading.Thread(target=end, daemon=True).start()

    def one():
        try:
            sock = socket.create_connection(port_of.getsockname()[:2])
            # Not in blocking mode, except where that is the point: with a time-out Python waits in poll.
            sock.settimeout(None if way == "threads" else 60)
            ask(sock, over)
        except BaseException as error:
            failed.append(error)

    # An error on the other side ends the program.
    threads = [threading.Thread(target=one, daemon=True) for _ in range(PAIRS)]
    for thread in threads:
        thread.start()
    return threads, failed


def echo_blocking(sock):
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.close()


def serve_threads(sock):
    for _ in range(PAIRS):
        threading.Thread(target=echo_blocking, args=(sock.accept()[0],), daemon=True).start()


def serve_selector(sock, selector):
    sock.setblocking(False)
    selector.register(sock, selectors.EVENT_READ)
    waiting = {}
    open_connections, accepted = 0, 0
    while accepted < PAIRS or open_connections:
        for key, events in selector.select(5):
            if key.fileobj is sock:
                connection, _ = sock.accept()
                connection.setblocking(False)
                waiting[connection] = bytearray()
                selector.register(connection, selectors.EVENT_READ)
                open_connections += 1
                accepted += 1
                continue
            connection, out = key.fileobj, waiting[key.fileobj]
            if events & selectors.EVENT_READ:
                data = connection.recv(30000)
                out += data
                if not data:
                    open_connections -= 1
                    selector.unregister(connection)
                    connection.close()
                    continue
            if out:
                try:
                    del out[: connection.send(out)]
                except BlockingIOError:
                    pass
            selector.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0))


def serve_edge(sock):
    """Edge-triggered: each connection is used until it would block."""
    epoll = select.epoll()
    sock.setblocking(False)
    epoll.register(sock, select.EPOLLIN)
    connections, done = {}, 0
    while done < PAIRS:
        for fd, _ in epoll.poll(5):
            if fd == sock.fileno():
                connection, _ = sock.accept()
                connection.setblocking(False)
                connections[connection.fileno()] = (connection, bytearray())
                epoll.register(connection, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
                continue
            connection, out = connections[fd]
            ended = False
            try:
                while data := connection.recv(20000):
                    out += data
                ended = True
            except BlockingIOError:
                pass
            try:
                while out:
                    del out[: connection.send(out)]
            except BlockingIOError:
                pass
            if ended and not out:
                del connections[fd]
                connection.close()
                done += 1


async def serve_asyncio(sock):
    left = PAIRS
    over = asyncio.Event()

    async def echo(reader, writer):
        nonlocal left
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
        left -= 1
        if not left:
            over.set()

    server = await asyncio.start_server(echo, sock=sock)
    async with server:
        await over.wait()


sock = listener()
threads, failed = clients(sock)
if way == "threads":
    serve_threads(sock)
elif way == "select":
    serve_selector(sock, selectors.SelectSelector())
elif way == "poll":
    serve_selector(sock, selectors.PollSelector())
elif way == "epoll":
    serve_selector(sock, selectors.EpollSelector())
elif way == "edge":
    serve_edge(sock)
elif way == "asyncio":
    asyncio.run(serve_asyncio(sock))
else:
    sys.exit(f"no such way: {way}")
for thread in threads:
    thread.join()
if failed:
    sys.exit(f"failed: {failed}")

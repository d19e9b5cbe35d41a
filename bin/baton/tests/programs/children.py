"""A server whose children inherit its epoll set, as in redis: each closes its descriptors, or waits with the set, and ends. The parent
still gets the events of its listener, of its connection, and of sets in its set. Programs that it starts meanwhile read what is unread. Usage: children.py [SECONDS SEED]

Each kind of child ten times, or for so many seconds, drawn at random. Prints how many connections there were."""

import os
import random
import select
import socket
import subprocess
import sys
import time

epoll = select.epoll()
listener = socket.create_server(("127.0.0.1", 0))
outer = select.epoll()
outer.register(epoll, select.EPOLLIN)
epoll.register(listener, select.EPOLLIN)
client = socket.create_connection(listener.getsockname(), timeout=10)
assert [fd for fd, _ in epoll.poll(10)] == [listener.fileno()]
server, _ = listener.accept()
epoll.register(server, select.EPOLLIN | select.EPOLLRDHUP)


def expect(fd):
    assert [known for known, _ in outer.poll(10)] == [epoll.fileno()], "the outer set"
    assert [known for known, _ in epoll.poll(10)] == [fd], "the set"


def exchange(n):
    message = bytes([n]) * 3000
    client.sendall(message)
    expect(server.fileno())
    got = b""
    while len(got) < len(message):
        got += server.recv(4096)
    assert got == message
    server.sendall(got)
    assert client.recv(3000, socket.MSG_WAITALL) == message


def close_one_by_one():
    for fd in (listener.fileno(), server.fileno(), client.fileno(), epoll.fileno()):
        os.close(fd)


def close_all():
    os.closerange(3, 1 << 16)


def wait_with_it():
    # The child gets events of what the parent has registered, with the parent's data.
    client.sendall(b"x")
    found = {fd for fd, _ in epoll.poll(10)}
    os._exit(0 if found == {server.fileno()} else 1)


def take_out_its_own():
    epoll.close()
    listener.close()


KINDS = (close_one_by_one, close_all, wait_with_it, take_out_its_own)


def kinds():
    if len(sys.argv) == 1:
        yield from KINDS * 10
        return
    end, chance = time.monotonic() + float(sys.argv[1]), random.Random(int(sys.argv[2]))
    while time.monotonic() < end:
        yield chance.choice(KINDS)


def start_programs():
    # The second one gets the connection as its standard input, with what is unread; the first one must leave that alone.
    client.sendall(b"unread\n")
    assert os.popen("head -n 1 < /dev/null").read() == ""
    done = subprocess.run(["head", "-c", "7"], stdin=server, stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == b"unread\n", done


made = 1
for n, what in enumerate(kinds()):
    exchange(n % 100)
    child = os.fork()
    if child == 0:
        what()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child that is to {what.__name__}"
    if what is wait_with_it:
        expect(server.fileno())
        assert server.recv(1) == b"x"
    start_programs()
    exchange(n % 100 + 100)
    another = socket.create_connection(listener.getsockname(), timeout=10)
    expect(listener.fileno())
    listener.accept()[0].close()
    another.close()
    made += 1
print(made)

"""Writes to a peer that never reads, until the socket takes no more, and again after each move. Prints one line: the bytes that were
taken in all, the most of SO_SNDBUF, and SIOCOUTQ and SIOCOUTQNSD at last.

Usage: pressure.py BATON PLACE SNDBUF WRITE MOVES BOTH CONNECTIONS. BATON is its program, or - to run natively; PLACE is where a connection
begins, nic or kernel; SNDBUF is what SO_SNDBUF is set to, 0 for nothing; WRITE is the length of a write; BOTH is 1 if the peer's end moves,
too.
"""

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys

SIOCOUTQ, SIOCOUTQNSD = 0x5411, 0x894B
baton, place = sys.argv[1:3]
sndbuf, write, moves, both, connections = map(int, sys.argv[3:])
outside = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def tool(*arguments):
    ran = subprocess.run([baton, *arguments], env=outside, capture_output=True, text=True)
    assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def queue(sock, request):
    return struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))[0]


def fill():
    """Writes until nothing goes for 1.2 s: an acknowledgement of the peer's, a probe of its window (after 0.2 s, 0.4 s more, 0.8 s more)
    and a growth of the buffer make room some time after the socket has said that there is none."""
    taken, waits = 0, 0
    while waits < 60:
        before = taken
        for sock in socks:
            try:
                while True:
                    taken += sock.send(bytes(write))
            except BlockingIOError:
                pass
        waits = waits + 1 if taken == before else 0
        # Waits: sixty looks without progress are the end of the filling.
        select.select([], socks, [], 0.02) if len(socks) == 1 else select.select([], [], [], 0.02)
    return taken


listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
peer = subprocess.Popen(
    [sys.executable, "-c", f"import socket, sys\npeers = [socket.create_connection(('127.0.0.1', {port})) for _ in range({connections})]\nsys.stdin.read()"],
    stdin=subprocess.PIPE,
    env=os.environ if both else outside,
)
socks = [listener.accept()[0] for _ in range(connections)]
if sndbuf:
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
which = "all" if both else f":{port}"
ends = connections * (1 + both)
if baton != "-":
    while tool("ls", "--json").count('"place":"nic"') < ends:
        select.select([], [], [], 0.02)
    if place == "kernel":
        tool("move", "kernel", which)
for sock in socks:
    sock.setblocking(False)
taken = fill()
for number in range(moves):
    place = "kernel" if place == "nic" else "nic"
    tool("move", place, which)
    if number in (0, moves - 2, moves - 1) or number % 10 == 0:
        taken += fill()
first = socks[0]
print(taken, first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), queue(first, SIOCOUTQ), queue(first, SIOCOUTQNSD))

"""Writes to a peer that never reads, until the socket takes no more, and again after each move. Prints one line: the bytes that were
taken in all; of one socket SO_SNDBUF, SIOCOUTQ and SIOCOUTQNSD at last; and the bytes of memory that all this takes then: the sockets of
both ends, shared memory, and what the program and Baton's processes have for themselves.

Usage: pressure.py BATON PLACE SNDBUF WRITE MOVES BOTH CONNECTIONS LOWAT. BATON is its program, or - to run natively; PLACE is where a connection
begins, nic or kernel; SNDBUF is what SO_SNDBUF is set to, 0 for nothing; WRITE is the length of a write; BOTH is 1 if the peer's end moves,
too; LOWAT is what TCP_NOTSENT_LOWAT is set to before the first write, 0 for nothing.
"""

import fcntl
import glob
import os
import re
import select
import socket
import struct
import subprocess
import sys

SIOCOUTQ, SIOCOUTQNSD, SO_MEMINFO = 0x5411, 0x894B, 55
outside = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def memory_of(sock):
    """Bytes of memory that the kernel has for a socket's queues: received, to be sent, reserved, and not processed yet."""
    info = struct.unpack("9I", sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36))
    return info[0] + info[5] + info[4] + info[7]


def peer(port, connections):
    """The other end: never reads, and prints how much memory its sockets take when it is asked."""
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    for _ in sys.stdin:
        print(sum(map(memory_of, socks)), flush=True)


if sys.argv[1] == "peer":
    sys.exit(peer(*map(int, sys.argv[2:])))

baton, place = sys.argv[1:3]
sndbuf, write, moves, both, connections, lowat = map(int, sys.argv[3:])


def tool(*arguments):
    ran = subprocess.run([baton, *arguments], env=outside, capture_output=True, text=True)
    assert ran.returncode == 0, f"{arguments}: {ran.stdout}{ran.stderr}"
    return ran.stdout


def queue(sock, request):
    return struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))[0]


def fill(patience=60):
    """Writes until nothing goes for 1.2 s, or less if `patience` is less than 60: an acknowledgement of the peer's, a probe of its window (after 0.2 s, 0.4 s more, 0.8 s more)
    and a growth of the buffer make room some time after the socket has said that there is none."""
    taken, waits = 0, 0
    while waits < patience:
        before = taken
        for sock in socks:
            try:
                while True:
                    taken += sock.send(bytes(write))
            except BlockingIOError:
                pass
        waits = waits + 1 if taken == before else 0
        # Waits: so many looks without progress are the end of the filling.
        select.select([], socks, [], 0.02) if len(socks) == 1 else select.select([], [], [], 0.02)
    return taken


def serving():
    """This process, and those of the Baton that serves it: they have the same directory for temporary files."""
    found = {os.getpid()}
    for path in glob.glob("/proc/[0-9]*/environ") if baton != "-" else []:
        try:
            with open(path, "rb") as file:
                variables = file.read().split(b"\0")
            if os.path.samefile(os.path.dirname(path) + "/exe", baton) and f"TMPDIR={os.environ['TMPDIR']}".encode() in variables:
                found.add(int(path.split("/")[2]))
        except OSError:
            pass  # It has ended.
    return found


def memory_of_processes():
    """Bytes that the program and Baton's processes have for themselves, and those of the memory that they share."""
    own, shared = 0, {}
    for process in serving():
        with open(f"/proc/{process}/status") as file:
            own += int(re.search(r"RssAnon:\s*(\d+)", file.read())[1]) << 10
        for path in glob.glob(f"/proc/{process}/fd/*"):
            try:
                if os.readlink(path).startswith("/memfd:baton"):
                    file = os.stat(path)
                    shared[file.st_ino] = file.st_blocks * 512
            except OSError:
                pass  # It has been closed.
    return own + sum(shared.values())


def memory():
    """Bytes of memory that all this takes, when pages that nobody needs have gone back."""
    least = None
    for _ in range(25 if connections > 1 else 1):
        other_end.stdin.write("\n")
        other_end.stdin.flush()
        total = int(other_end.stdout.readline()) + sum(map(memory_of, socks)) + memory_of_processes()
        least = min(total, least or total)
        # Waits: pages go back a second after they are free, those of so many connections at a time.
        select.select([], [], [], 0.1)
    return least


listener = socket.create_server(("127.0.0.1", 0), backlog=connections)
port = listener.getsockname()[1]
other_end = subprocess.Popen(
    [sys.executable, __file__, "peer", str(port), str(connections)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
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
        # Waits: between two looks.
        select.select([], [], [], 0.02)
    if place == "kernel":
        tool("move", "kernel", which)
for sock in socks:
    if lowat:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, lowat)
    sock.setblocking(False)
taken = fill()
for number in range(moves):
    place = "kernel" if place == "nic" else "nic"
    tool("move", place, which)
    taken += fill(60 if number in (0, moves // 2, moves - 2, moves - 1) else 1)
first = socks[0]
sizes = first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), queue(first, SIOCOUTQ), queue(first, SIOCOUTQNSD)
print(taken, *sizes, memory())

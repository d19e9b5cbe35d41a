"""Clients of the system's nginx and redis: a connection that asks when it is told to, and a load that goes on by itself."""

import json
import subprocess
import sys
import time

from container import PATIENCE, wait_until

# A client of this machine's Python in the system's network: a line with a number makes so many requests on one connection.
CLIENT = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", 80), 60)
stream = peer.makefile("rb")
for line in sys.stdin:
    for _ in range(int(line)):
        peer.sendall(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        status = stream.readline()
        assert b" 200 " in status, status
        length = None
        while (header := stream.readline()) != b"\\r\\n":
            assert header, "the connection has ended"
            name, value = header.split(b":", 1)
            if name.lower() == b"content-length":
                length = int(value)
        body = stream.read(length)
        assert len(body) == length and b"nginx" in body
    print(peer.getsockname()[1], flush=True)
"""

# The same of redis.
REDIS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", 6379), 60)
stream = peer.makefile("rb")
for line in sys.stdin:
    for number in range(int(line)):
        peer.sendall(b"PING %d\\r\\n" % number)
        assert stream.readline() == b"$%d\\r\\n" % len(str(number))
        assert stream.readline() == b"%d\\r\\n" % number
    print(peer.getsockname()[1], flush=True)
"""

# Connections to nginx, each of which asks again a while after it was answered; one that breaks is counted and made anew. A line of input
# is answered with the connections' local ports and what has happened since the last line `mark`.
LOAD = """
import json, os, socket, sys, threading, time
lock, ports, counts = threading.Lock(), {}, {}

def clear():
    counts.update(requests=0, failed=[], longest=0.0)

def ask(peer, stream):
    peer.sendall(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
    status = stream.readline()
    if b" 200 " not in status:
        raise OSError(f"the answer is {status!r}")
    length = None
    while (header := stream.readline()) != b"\\r\\n":
        if not header:
            raise OSError("the connection has ended")
        name, _, value = header.lower().partition(b":")
        if name == b"content-length":
            length = int(value)
    body = stream.read(length)
    if len(body) != length or b"nginx" not in body:
        raise OSError("it is another answer")

def client(number, pace):
    peer = stream = None
    while True:
        begun, error = time.monotonic(), None
        try:
            if peer is None:
                peer = socket.create_connection(("127.0.0.1", 80), 60)
                stream = peer.makefile("rb")
                with lock:
                    ports[number] = peer.getsockname()[1]
            ask(peer, stream)
        except OSError as why:
            error = f"{type(why).__name__}: {why}"
            for one in (stream, peer):
                if one is not None:
                    one.close()
            peer = stream = None
        with lock:
            counts["longest"] = max(counts["longest"], time.monotonic() - begun)
            if error is None:
                counts["requests"] += 1
            else:
                counts["failed"].append(error)
        # Waits: the load's pace.
        time.sleep(pace)

clear()
for number in range(int(sys.argv[1])):
    threading.Thread(target=client, args=(number, float(sys.argv[2])), daemon=True).start()
for line in sys.stdin:
    with lock:
        print(json.dumps({"ports": sorted(ports.values()), **counts}), flush=True)
        if line.strip() == "mark":
            clear()
os._exit(0)
"""


class Client:
    def __init__(self, system, script=CLIENT):
        command = system.in_network(sys.executable, "-c", script)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, requests=20):
        """Makes requests, and returns the connection's local port."""
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client's connection broke"
        return int(line)

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0


def on_nic(system, command="baton"):
    """The peers' ports of all connections that are on a NIC; none while no Baton answers."""
    status, said = system.run(command, "ls", "--json", check=False)
    try:
        listed = json.loads(said) if status == 0 else []
    except ValueError:
        # A Baton that ends in this moment is mentioned on standard error.
        listed = []
    return {int(one["peer"].rsplit(":", 1)[1]) for one in listed if one["place"] == "nic"}


class Load:
    """So many connections to nginx, each of which asks every `pace` seconds."""

    def __init__(self, system, connections, pace=0.02):
        self.system, self.connections = system, connections
        command = system.in_network(sys.executable, "-c", LOAD, str(connections), str(pace))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def mark(self):
        """What has happened since the last mark: requests, those that failed and why, seconds of the longest."""
        return self.says("mark")

    def is_on_nic(self, command="baton"):
        """Whether all its connections are on a NIC."""
        ports = set(self.says("look")["ports"])
        return len(ports) == self.connections and ports <= on_nic(self.system, command)

    def await_nic(self, why):
        wait_until(f"all connections are on the NIC: {why}", self.is_on_nic)

    def expect_no_failure(self):
        counts = self.mark()
        assert counts["requests"] > 0 and not counts["failed"], counts
        print(f"  {counts['requests']} requests, none failed, the longest took {counts['longest'] * 1000:.0f} ms")

    def away(self, process, command):
        """The longest time for which not all of its connections were on a NIC while a process ran and until all are there again: from
        the last look that found them all there to the end of the next one that does. In seconds. `command`: that of Baton's."""
        longest, there = 0.0, time.monotonic()
        until = there + PATIENCE
        while True:
            begun, over = time.monotonic(), process.poll() is not None
            assert begun < until, f"the connections were away from the NIC for {PATIENCE} s"
            if self.is_on_nic(command):
                longest, there = max(longest, time.monotonic() - there), begun
                if over:
                    return longest
            time.sleep(0.02)  # Waits: between two looks, which cost a processor some milliseconds.

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0


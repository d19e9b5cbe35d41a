"""Exchanges bytes with itself inside a control group of its own. While its connections are on the NIC, a BPF program that drops everything
is attached to the group. Prints after how many milliseconds that took effect, and how many connections were on the NIC."""
import os
import socket
import subprocess
import sys
import tempfile
import time

from bpf import EGRESS, FILTER, attach, detach, enter, load, own_group, returning

BATON = sys.argv[1]
SOCKET = f"{tempfile.gettempdir()}/baton-run-{os.getpid()}/agent.sock"


def on_nic():
    env = dict(os.environ, BATON_SOCKET=SOCKET)
    listed = subprocess.run([BATON, "ls", "--json"], env=env, capture_output=True, check=True).stdout
    return listed.count(b'"place":"nic"')


def sent_in_vain(one):
    """How often the kernel has tried in vain to send what it has to: tcpi_retransmits, or tcpi_probes where nothing has left."""
    return max(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[2:4])


def arrived(other):
    """What has arrived, without waiting."""
    data = b""
    while True:
        try:
            piece = other.recv(1 << 16)
            assert piece, "the connection has ended"
            data += piece
        except BlockingIOError:
            return data


def exchange(one, other):
    one.sendall(b"x" * 1000)
    got = 0
    while got < 1000:
        got += len(other.recv(1000))


with own_group() as (group, directory):
    enter(group)
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    end = time.monotonic() + 60
    while on_nic() < 2:
        exchange(one, other)
        exchange(other, one)
        assert time.monotonic() < end, "they never came to the NIC"
    there = on_nic()
    program = load(FILTER, returning(0), EGRESS)
    attach(directory, program, EGRESS)
    attached = time.monotonic()
    last = attached
    other.setblocking(False)
    while on_nic():
        one.send(b"y")
        if arrived(other):
            last = time.monotonic()
        assert time.monotonic() < attached + 60, "the program is never met"
    # What is sent now does not arrive, although the kernel tries to send it again.
    arrived(other)
    one.send(b"z")
    while sent_in_vain(one) < 1:
        assert arrived(other) == b"" and time.monotonic() < attached + 60, "it is not dropped"
    assert arrived(other) == b"", "it is not dropped"
    detach(directory, program, EGRESS)
    other.settimeout(60)
    while other.recv(1) != b"z":
        pass
    exchange(one, other)
    print(int((last - attached) * 1000), there)

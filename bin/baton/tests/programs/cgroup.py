"""Exchanges bytes with itself inside a control group of its own. While its connections are on the NIC, a BPF program that drops everything
is attached to the group. Prints after how many milliseconds that took effect, and how many connections were on the NIC."""
import ctypes
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time

BATON = sys.argv[1]
SOCKET = f"{tempfile.gettempdir()}/baton-run-{os.getpid()}/agent.sock"
mount = next(line.split()[1] for line in open("/proc/self/mounts") if line.split()[2] == "cgroup2")
group = f"{mount}/baton-test-{os.getpid()}"
BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    result = libc.syscall(BPF, command, buffer, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), "bpf")
    return result


def dropping():
    """A program for BPF_CGROUP_INET_EGRESS: r0 = 0; exit."""
    code = ctypes.create_string_buffer(bytes.fromhex("b700000000000000" "9500000000000000"), 16)
    license = ctypes.create_string_buffer(b"GPL")
    return bpf(5, struct.pack("IIQQIIQI", 8, 2, ctypes.addressof(code), ctypes.addressof(license), 0, 0, 0, 0))


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


os.mkdir(group)
try:
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    end = time.monotonic() + 60
    while on_nic() < 2:
        exchange(one, other)
        exchange(other, one)
        assert time.monotonic() < end, "they never came to the NIC"
    there = on_nic()
    directory, program = os.open(group, os.O_RDONLY), dropping()
    bpf(8, struct.pack("IIII", directory, program, 1, 0))
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
    bpf(9, struct.pack("IIII", directory, program, 1, 0))
    other.settimeout(60)
    while other.recv(1) != b"z":
        pass
    exchange(one, other)
    print(int((last - attached) * 1000), there)
finally:
    open(f"{mount}/cgroup.procs", "w").write(str(os.getpid()))
    os.rmdir(group)

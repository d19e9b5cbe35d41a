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
    end = time.monotonic() + 10
    while on_nic() < 2:
        exchange(one, other)
        exchange(other, one)
        assert time.monotonic() < end, "they never came to the NIC"
    there = on_nic()
    directory, program = os.open(group, os.O_RDONLY), dropping()
    bpf(8, struct.pack("IIII", directory, program, 1, 0))
    attached = time.monotonic()
    last = attached
    one.settimeout(0.005)
    other.settimeout(0.5)
    try:
        while True:
            one.send(b"y")
            other.recv(1)
            last = time.monotonic()
            assert last < attached + 5, "the program is never met"
    except TimeoutError:
        pass
    bpf(9, struct.pack("IIII", directory, program, 1, 0))
    other.settimeout(10)
    assert other.recv(1) == b"y"
    exchange(one, other)
    print(int((last - attached) * 1000), there)
finally:
    open(f"{mount}/cgroup.procs", "w").write(str(os.getpid()))
    os.rmdir(group)

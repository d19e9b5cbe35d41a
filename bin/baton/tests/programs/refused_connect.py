"""Connects to an address and port from a control group of its own: as it is, then with a BPF program attached that refuses connect(2),
blocking and not, and once more without it. Prints what each call has given."""
import ctypes
import errno
import os
import socket
import struct
import sys
import time

AT = (sys.argv[1], int(sys.argv[2]))
mount = next(line.split()[1] for line in open("/proc/self/mounts") if line.split()[2] == "cgroup2")
group = f"{mount}/baton-refused-{os.getpid()}"
BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
LOAD, ATTACH, DETACH = 5, 8, 9
# BPF_PROG_TYPE_CGROUP_SOCK_ADDR at BPF_CGROUP_INET4_CONNECT.
ADDRESS, CONNECT4 = 18, 10
libc = ctypes.CDLL(None, use_errno=True)


def bpf(command, attributes):
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    result = libc.syscall(BPF, command, buffer, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf {command}")
    return result


def refusing():
    """r0 = 0; exit."""
    code = ctypes.create_string_buffer(bytes.fromhex("b700000000000000" "9500000000000000"), 16)
    license = ctypes.create_string_buffer(b"GPL")
    fields = struct.pack("IIQQIIQI", ADDRESS, 2, ctypes.addressof(code), ctypes.addressof(license), 0, 0, 0, 0)
    return bpf(LOAD, fields.ljust(68, b"\0") + struct.pack("I", CONNECT4))


def attempt(blocking=True):
    one = socket.socket()
    one.setblocking(blocking)
    return errno.errorcode.get(one.connect_ex(AT), "open")


os.mkdir(group)
try:
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
    given = [attempt()]
    directory, program = os.open(group, os.O_RDONLY), refusing()
    bpf(ATTACH, struct.pack("IIII", directory, program, CONNECT4, 0))
    # Waits: an agent takes what it has found out about a group for true for 10 ms; nothing shows when they are over.
    time.sleep(0.2)
    given += [attempt(), attempt(blocking=False)]
    bpf(DETACH, struct.pack("IIII", directory, program, CONNECT4, 0))
    # Waits: for the same.
    time.sleep(0.2)
    given += [attempt()]
    print(*given)
finally:
    open(f"{mount}/cgroup.procs", "w").write(str(os.getpid()))
    os.rmdir(group)

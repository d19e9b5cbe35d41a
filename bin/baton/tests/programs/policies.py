"""Exchanges bytes with itself inside a control group of its own, to which BPF programs are attached as the first argument says. Prints
'ok' if the policy held and no connection was harmed."""
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time

from bpf import ADDRESS, CONNECT4, EGRESS, FILTER, OPTION, SETSOCKOPT, SOCK_OPS, STATES
from bpf import attach, bpf, detach, enter, load, own_group, returning

CASE, BATON = sys.argv[1:3]
SOCKET = f"{tempfile.gettempdir()}/baton-run-{os.getpid()}/agent.sock"
LIMIT = 30


def swallowing():
    """ctx->optlen = -1, by which setsockopt(2) succeeds without an effect; r0 = 1; exit."""
    begin = struct.pack("<BBhi", 0xB7, 2, 0, -1) + struct.pack("<BBhi", 0x63, 0x21, 32, 0)
    return begin + returning(1)


def by_map(number):
    """Returns 1 if the first value of the array is not 0, else 0."""
    return b"".join(
        struct.pack("<BBhi", *instruction)
        for instruction in [
            (0x62, 10, -4, 0),  # key 0 on the stack
            (0xBF, 0xA2, 0, 0),  # r2 = r10
            (0x07, 2, 0, -4),  # r2 -= 4
            (0x18, 0x11, 0, number),  # r1 = map
            (0x00, 0, 0, 0),
            (0x85, 0, 0, 1),  # map_lookup_elem
            (0x15, 0, 3, 0),  # not there: exit with 0
            (0x61, 0x01, 0, 0),  # r1 = value
            (0xB7, 0, 0, 1),  # r0 = 1
            (0x55, 1, 1, 0),  # r1 != 0: exit
            (0xB7, 0, 0, 0),  # r0 = 0
            (0x95, 0, 0, 0),
        ]
    )


def array(flags=0):
    return bpf(0, struct.pack("IIIII", 2, 4, 4, 1, flags))


def put(number, value):
    key, value = ctypes.create_string_buffer(4), ctypes.create_string_buffer(struct.pack("I", value), 4)
    bpf(2, struct.pack("IIQQQ", number, 0, ctypes.addressof(key), ctypes.addressof(value), 0))


def listed():
    env = dict(os.environ, BATON_SOCKET=SOCKET)
    shown = subprocess.run([BATON, "ls", "--json"], env=env, capture_output=True, check=True).stdout
    return json.loads(shown)


def text():
    return json.dumps(listed())


def on_nic():
    return text().count('"place": "nic"')


def exchange(times=1):
    for _ in range(times):
        for sender, receiver in [(one, other), (other, one)]:
            sender.sendall(b"x" * 1000)
            got = 0
            while got < 1000:
                piece = receiver.recv(1000)
                assert piece, "it has ended"
                got += len(piece)


def until(what, condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what}: {text()}"
        exchange()


def stays(why):
    """They carry data, the rule applies to them, and they are in the kernel, for this reason."""
    until(f"no reason with {why!r}", lambda: text().count(why) >= 2)
    exchange(20)
    assert on_nic() == 0, text()


def connect():
    # The connecting socket belongs to the group in which it was made.
    early = socket.socket()
    enter(group)
    yield
    listener = socket.create_server(("127.0.0.1", 0))
    early.connect(listener.getsockname())
    accepted, _ = listener.accept()
    for end in (early, accepted):
        end.settimeout(LIMIT)
    yield early, accepted


with own_group() as (group, directory):
    steps = connect()
    next(steps)
    if CASE == "refused":
        attach(directory, load(ADDRESS, returning(0), CONNECT4), CONNECT4)
        one, other = next(steps)
        stays("refuse a connect(2)")
    elif CASE == "allowed":
        attach(directory, load(ADDRESS, returning(1), CONNECT4), CONNECT4)
        one, other = next(steps)
        until("on the NIC", lambda: on_nic() == 2)
        exchange(20)
    elif CASE == "refused later":
        one, other = next(steps)
        until("on the NIC", lambda: on_nic() == 2)
        program = load(ADDRESS, returning(0), CONNECT4)
        attach(directory, program, CONNECT4)
        # They cannot come back, and go on where they are.
        until("no reason", lambda: text().count("refuse a connect(2)") == 2)
        exchange(20)
        assert on_nic() == 2, text()
        detach(directory, program, CONNECT4)
        until("the reason stays", lambda: "refuse a connect(2)" not in text())
        exchange(20)
    elif CASE == "map":
        numbers = array()
        put(numbers, 1)
        attach(directory, load(FILTER, by_map(numbers), EGRESS), EGRESS)
        one, other = next(steps)
        stays("by a map")
        put(numbers, 0)
        # Waits: nothing is to arrive, and nothing shows that it does not.
        other.settimeout(0.5)
        # Its sender is the accepted end: the other one was made outside of the group.
        one, other = other, one
        one.sendall(b"five!")
        # Waits: nothing is to arrive, and nothing shows that it does not.
        other.settimeout(0.5)
        try:
            raise AssertionError(f"{other.recv(5)} passes")
        except TimeoutError:
            pass
        put(numbers, 1)
        other.settimeout(LIMIT)
        assert other.recv(5) == b"five!"
    elif CASE == "fixed map":
        OF_PROGRAMS = 1 << 7
        numbers = array(OF_PROGRAMS)
        put(numbers, 1)
        bpf(22, struct.pack("I", numbers))
        attach(directory, load(FILTER, by_map(numbers), EGRESS), EGRESS)
        one, other = next(steps)
        until("on the NIC", lambda: on_nic() == 2)
        exchange(20)
    elif CASE == "options":
        attach(directory, load(OPTION, swallowing(), SETSOCKOPT), SETSOCKOPT)
        one, other = next(steps)
        stays("setsockopt")
        # The accepted end: the other one was made outside of the group.
        for level, option in [(socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE)]:
            other.setsockopt(level, option, 1)
            assert other.getsockopt(level, option) == 0, f"{option} has an effect"
        exchange(20)
    elif CASE == "states":
        attach(directory, load(STATES, returning(1), SOCK_OPS), SOCK_OPS)
        one, other = next(steps)
        stays("sock_ops")
    print("ok")

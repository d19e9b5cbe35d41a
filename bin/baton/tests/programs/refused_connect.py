"""Connects to an address and port from a control group of its own: as it is, then with a BPF program attached that refuses connect(2),
blocking and not, and once more without it. Prints what each call has given."""
import errno
import socket
import sys
import time

from bpf import ADDRESS, CONNECT4, attach, detach, enter, load, own_group, returning

AT = (sys.argv[1], int(sys.argv[2]))


def attempt(blocking=True):
    one = socket.socket()
    one.setblocking(blocking)
    return errno.errorcode.get(one.connect_ex(AT), "open")


with own_group() as (group, directory):
    enter(group)
    given = [attempt()]
    program = load(ADDRESS, returning(0), CONNECT4)
    attach(directory, program, CONNECT4)
    # Waits: an agent takes what it has found out about a group for true for 10 ms; nothing shows when they are over.
    time.sleep(0.2)
    given += [attempt(), attempt(blocking=False)]
    detach(directory, program, CONNECT4)
    # Waits: for the same.
    time.sleep(0.2)
    given += [attempt()]
    print(*given)

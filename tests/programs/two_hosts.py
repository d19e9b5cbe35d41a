"""Python's own tests on two hosts: their servers are on one and their clients on the other, so that what the two exchange crosses the
wire, though it is one process. When a TCP socket is bound to the loopback address it becomes one of the other host's, at that host's
address, to which the clients connect instead. IPv6, Unix sockets and datagrams stay as they are.

Usage: two_hosts.py SERVERS ADDRESS ARGUMENTS... SERVERS is the servers' network namespace (a file), ADDRESS its address; the arguments are
those of `python3 -m test`.
"""

import ctypes
import os
import socket
import sys

CLONE_NEWNET = 0x40000000
LOOPBACK = ("127.0.0.1", "localhost", "")
OPTIONS = ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_NODELAY))
setns = ctypes.CDLL(None, use_errno=True).setns


def go_to(namespace):
    """Moves this thread: the sockets that it makes are of that host."""
    if setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def is_loopback(sock, address):
    tcp = sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM
    return tcp and isinstance(address, tuple) and len(address) == 2 and address[0] in LOOPBACK


def main():
    servers, host, *arguments = sys.argv[1:]
    servers, own = (os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in (servers, "/proc/thread-self/ns/net"))
    bind, connect, connect_ex = socket.socket.bind, socket.socket.connect, socket.socket.connect_ex

    def bind_there(sock, address):
        if is_loopback(sock, address):
            go_to(servers)
            try:
                moved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            finally:
                go_to(own)
            for level, option in OPTIONS:
                moved.setsockopt(level, option, sock.getsockopt(level, option))
            moved.settimeout(sock.gettimeout())
            os.dup2(moved.fileno(), sock.fileno(), inheritable=sock.get_inheritable())
            moved.close()
            address = (host if address[0] else "", address[1])
        return bind(sock, address)

    def to_servers(call):
        return lambda sock, address: call(sock, (host, address[1]) if is_loopback(sock, address) else address)

    socket.socket.bind = bind_there
    socket.socket.connect, socket.socket.connect_ex = to_servers(connect), to_servers(connect_ex)
    sys.argv[1:] = arguments
    from test.libregrtest.main import main as run_tests

    run_tests()


if __name__ == "__main__":
    main()

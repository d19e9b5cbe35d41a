"""Echo servers in Python's ways: asyncio, uvloop, selectors, ssl, socketserver, fork; and one for many connections. Each prints its port."""

import asyncio
import os
import select
import selectors
import signal
import socket
import socketserver
import ssl
import sys
import threading

LISTENS = os.environ["LISTENS"]
FAMILY = socket.AF_INET6 if ":" in LISTENS else socket.AF_INET


def announce(port):
    print(port, flush=True)


async def asyncio_server():
    async def echo(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, LISTENS, 0)
    announce(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def selectors_server():
    selector = selectors.DefaultSelector()
    listener = socket.create_server((LISTENS, 0), family=FAMILY)
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    announce(listener.getsockname()[1])
    while True:
        for key, events in selector.select():
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, bytearray())
                continue
            sock, waiting = key.fileobj, key.data
            if events & selectors.EVENT_READ and len(waiting) < 1 << 20:
                data = sock.recv(65536)
                if not data and not waiting:
                    selector.unregister(sock)
                    sock.close()
                    continue
                waiting += data
            if waiting:
                try:
                    del waiting[: sock.send(waiting)]
                except BlockingIOError:
                    pass
            selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0), waiting)


def many_server():
    """For thousands of connections: the work for one does not depend on the number of others."""
    events = select.epoll()
    listener = socket.create_server((LISTENS, 0), family=FAMILY, backlog=4096)
    listener.setblocking(False)
    events.register(listener, select.EPOLLIN)
    announce(listener.getsockname()[1])
    links = {}
    while True:
        for fd, _ in events.poll():
            if fd == listener.fileno():
                link, _ = listener.accept()
                # With a time-out it is not in blocking mode, in which an attached program's connections stay in the kernel.
                link.settimeout(60)
                links[link.fileno()] = link
                events.register(link, select.EPOLLIN)
            elif data := links[fd].recv(65536):
                links[fd].sendall(data)
            else:
                events.unregister(fd)
                links.pop(fd).close()


def ssl_server(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server((LISTENS, 0), family=FAMILY)
    announce(listener.getsockname()[1])

    def serve(sock):
        with context.wrap_socket(sock, server_side=True) as secure:
            while data := secure.recv(16384):
                secure.sendall(data)

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)


def socketserver_server():
    socketserver.ThreadingTCPServer.daemon_threads = True
    socketserver.ThreadingTCPServer.address_family = FAMILY
    with socketserver.ThreadingTCPServer((LISTENS, 0), Echo) as server:
        announce(server.server_address[1])
        server.serve_forever()


def fork_server():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.create_server((LISTENS, 0), family=FAMILY)
    announce(listener.getsockname()[1])
    while True:
        sock, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            while data := sock.recv(65536):
                sock.sendall(data)
            os._exit(0)
        sock.close()


ways = {"selectors": selectors_server, "many": many_server, "ssl": ssl_server, "socketserver": socketserver_server, "fork": fork_server}
if sys.argv[1] == "asyncio":
    asyncio.run(asyncio_server())
elif sys.argv[1] == "uvloop":
    import uvloop

    uvloop.run(asyncio_server())
else:
    ways[sys.argv[1]](*sys.argv[2:])

"""Connections to itself, and what happens to them when Baton ends. Usage: survivor.py WAY COUNT

The server's side waits in one of several ways: block (a thread for each connection), poll, select, epoll, edge, spin (it does not wait,
except for short sleeps). The client's side is driven by lines on the standard input, each answered with one line of JSON:
  echo    one round on every connection: how it ended on either side, the longest round, CPU seconds since the last answer
  wait    waits until the server's side of every connection has ended by itself, eight seconds at most
  write   sends on every connection until a send fails, eight seconds at most
"""
import errno, json, select, socket, sys, threading, time

way, count = sys.argv[1], int(sys.argv[2])
ends = {}


def note(number, error):
    ends[number] = "end" if error is None else errno.errorcode.get(error.errno, str(error))


def echo(connection):
    """False at the end of the stream."""
    data = connection.recv(4096)
    if data:
        connection.sendall(data)
    return bool(data)


def serve_blocking(number, connection):
    try:
        while echo(connection):
            pass
        note(number, None)
    except OSError as error:
        note(number, error)


def serve_events(connections):
    by_fd = {connection.fileno(): (number, connection) for number, connection in enumerate(connections)}
    for connection in connections:
        connection.setblocking(False)
    if way in ("epoll", "edge"):
        waiter = select.epoll()
        events = select.EPOLLIN | (select.EPOLLET if way == "edge" else 0)
        for fd in by_fd:
            waiter.register(fd, events)
    elif way == "poll":
        waiter = select.poll()
        for fd in by_fd:
            waiter.register(fd, select.POLLIN)
    while by_fd:
        if way == "select":
            ready = select.select(list(by_fd), [], [])[0]
        elif way == "spin":
            # Waits: this way to wait is to look now and then.
            time.sleep(0.002)
            ready = list(by_fd)
        else:
            ready = [fd for fd, _ in waiter.poll()]
        for fd in ready:
            number, connection = by_fd[fd]
            try:
                while echo(connection):
                    pass
                note(number, None)
            except BlockingIOError:
                continue
            except OSError as error:
                note(number, error)
            if way not in ("select", "spin"):
                waiter.unregister(fd)
            del by_fd[fd]


def one_round(client):
    try:
        for length in (1, 1000, 30000):
            sent = bytes([length % 251]) * length
            client.sendall(sent)
            got = b""
            while len(got) < length:
                piece = client.recv(length - len(got))
                if not piece:
                    return "end"
                got += piece
            if got != sent:
                return "wrong bytes"
        return "ok"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def keep_writing(client):
    client.settimeout(8)
    try:
        while True:
            client.send(bytes(65536))
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


listener = socket.create_server(("127.0.0.1", 0), backlog=count)
clients, servers = [], []
for _ in range(count):
    client = socket.create_connection(listener.getsockname())
    # What a NIC has acknowledged is not sent again. A client that waits for the answer of a server whose connection was lost with the
    # NIC has nothing to send, and finds out by its next probe, as after a crash of a host.
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1)):
        client.setsockopt(socket.IPPROTO_TCP, option, value)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    clients.append(client)
    servers.append(listener.accept()[0])
if way == "block":
    for number, server in enumerate(servers):
        threading.Thread(target=serve_blocking, args=(number, server), daemon=True).start()
else:
    threading.Thread(target=serve_events, args=(servers,), daemon=True).start()
print(json.dumps([one_round(client) for client in clients]), flush=True)
spent = time.process_time()
for line in sys.stdin:
    started, results, longest = time.monotonic(), [], 0
    if line.strip() == "wait":
        while len(ends) < count and time.monotonic() < started + 8:
            # Waits: between two looks.
            time.sleep(0.01)
        longest = time.monotonic() - started
    else:
        for client in clients:
            begun = time.monotonic()
            results.append(one_round(client) if line.strip() == "echo" else keep_writing(client))
            longest = max(longest, time.monotonic() - begun)
    now = time.process_time()
    ended = sorted(ends.values())
    print(json.dumps({"client": results, "server": ended, "longest": longest, "cpu": now - spent}), flush=True)
    spent = now

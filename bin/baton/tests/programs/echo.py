"""An echo server at an address. It prints its port, and ends at the end of its input."""

import selectors
import socket
import sys

selector = selectors.DefaultSelector()
listener = socket.create_server((sys.argv[1], 0))
selector.register(listener, selectors.EVENT_READ)
selector.register(sys.stdin, selectors.EVENT_READ)
print(listener.getsockname()[1], flush=True)
while True:
    for key, _ in selector.select():
        if key.fileobj is sys.stdin:
            sys.exit()
        if key.fileobj is listener:
            connection = listener.accept()[0]
            # Not in blocking mode, in which an attached program's connections stay in the kernel; sendall waits nevertheless.
            connection.settimeout(60)
            selector.register(connection, selectors.EVENT_READ)
            continue
        data = key.fileobj.recv(65536)
        if data:
            key.fileobj.sendall(data)
        else:
            selector.unregister(key.fileobj)
            key.fileobj.close()

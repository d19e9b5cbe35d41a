"""What the tests in this folder share: a network namespace, a load that Baton moves, processes that end with the test."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Longer than the slowest of these steps takes on a machine that is busy with other tests.
PATIENCE = 120
INSIDE = "BATON_OPERATE_NAMESPACE"

# An echo server on loopback with CLIENTS clients, each of which exchanges SIZE bytes every PAUSE seconds. It runs FIRST, prints its port, and
# ends when its standard input does. `made` gets each client's socket and number.
LOAD = """
import asyncio, os, socket, sys

def made(client, number):
    pass

FIRST

async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def client(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made(writer.get_extra_info("socket"), number)
    while True:
        writer.write(b"x" * SIZE)
        await reader.readexactly(SIZE)
        await asyncio.sleep(PAUSE)  # Waits: the load's pace.

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clients = [asyncio.create_task(client(port, number)) for number in range(CLIENTS)]
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)

asyncio.run(main())
"""


def load(clients, size, pause, first=""):
    """The text of that load."""
    text = LOAD.replace("FIRST", first)
    for name, value in {"CLIENTS": clients, "SIZE": size, "PAUSE": pause}.items():
        text = text.replace(name, str(value))
    return text


def step(text):
    print(f"▸ {text}", flush=True)


def wait_until(what, holds):
    """Waits for what no event tells of."""
    until = time.monotonic() + PATIENCE
    while not (got := holds()):
        assert time.monotonic() < until, f"{what}: not within {PATIENCE} s"
        time.sleep(0.1)  # Waits: it is looked at again; the bound is minutes.
    return got


@contextlib.contextmanager
def running(command, **settings):
    """A process that ends with the block, if it has not ended before."""
    process = subprocess.Popen([str(word) for word in command], **settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def in_namespace(check):
    """Runs the check with the program that the command line names, in a network namespace with loopback only."""
    if os.environ.get(INSIDE) is None:
        inside = 'ip link set lo up && exec "$@"'
        command = ["unshare", "--net", "sh", "-ec", inside, "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    check(Path(sys.argv[1]).resolve())
    step("done")

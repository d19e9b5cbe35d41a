#!/usr/bin/env python3
"""The cost of a connection does not grow with the number of connections: few and many connections are accepted, used, moved, listed and
closed, under `baton run`, under `baton run --flip 1..50` and under `baton attach`. Every byte is compared, nothing may be
reset, and the time per connection with many is compared with that with few.

    tests/programs/scale.py                          # 125 and 1,000 connections
    BATON_SCALE=5000 tests/programs/scale.py         # 625 and 5,000
    tests/programs/scale.py --only attach --few 500 --many 5000

It needs root, and makes a network namespace of its own.
"""

import argparse
import collections
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import programs
from programs import BATON, HERE, check

# With many connections each may take this many times longer than with few: this machine is noisy, and its caches are small.
GROWTH = 3.0
# Few connections take a few milliseconds, in which one move more or less counts: they are measured so many times.
ROUNDS = 4
# Longest allowed time of an answer, in seconds: a program is stopped, or waits, for a batch of moves and not for all of them.
PATIENCE = 3.0
# Connections that are made at the same time.
WINDOW = 64


class Scene(programs.Trial):
    def __init__(self, mode, directory):
        super().__init__("many", mode, 0, directory)
        self.server = None
        # The Baton of this trial, and no other.
        self.environment = os.environ | {"TMPDIR": str(directory)}

    def serve(self):
        server = [sys.executable, HERE / "servers.py", "many"]
        self.server = self.under_baton(server, stdout=subprocess.PIPE, env=self.environment)
        return int(self.server.stdout.readline())

    def attach(self, process):
        command = [BATON, "attach", "--log", self.directory / "baton.log", "--json", process.pid]
        self.attacher = self.start(command, stdout=subprocess.PIPE, env=self.environment)

    def known(self):
        """The output of `baton ls`."""
        for place in self.directory.glob("baton-run-*/agent.sock"):
            done = subprocess.run([BATON, "ls", "--json", "--socket", place], capture_output=True, timeout=60)
            if done.returncode == 0:
                return json.loads(done.stdout)
        return []


class Client:
    """Many connections to an echo server, each with at most one request in flight."""

    def __init__(self, port):
        self.port, self.selector, self.links, self.slowest = port, selectors.DefaultSelector(), [], 0.0

    def open(self, count):
        waiting = {}
        started = 0
        while started < count or waiting:
            while started < count and len(waiting) < WINDOW:
                link = socket.socket()
                link.setblocking(False)
                link.connect_ex(("127.0.0.1", self.port))
                self.selector.register(link, selectors.EVENT_WRITE)
                waiting[link] = time.monotonic()
                started += 1
            for key, _ in self.events(waiting):
                link = key.fileobj
                if key.events == selectors.EVENT_WRITE:
                    error = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    check(error == 0, f"a connection could not be made: {os.strerror(error)}")
                    link.send(b"hello")
                    self.selector.modify(link, selectors.EVENT_READ)
                else:
                    check(link.recv(100) == b"hello", "a first answer came wrong")
                    self.done(waiting, link)
                    self.links.append(link)

    def ask_all(self, length):
        """Sends one request on every connection."""
        waiting, got, left = {}, {}, list(self.links)
        while left or waiting:
            while left and len(waiting) < WINDOW:
                link = left.pop()
                question = bytes([len(left) % 251]) * length
                waiting[link], got[link] = time.monotonic(), [question, 0]
                self.selector.register(link, selectors.EVENT_READ)
                check(link.send(question) == length, "a question does not fit")
            for key, _ in self.events(waiting):
                link = key.fileobj
                piece, (question, at) = link.recv(65536), got[link]
                check(piece and piece == question[at : at + len(piece)], f"an answer came wrong: {len(piece)} bytes at {at}")
                got[link][1] += len(piece)
                if got[link][1] == length:
                    self.done(waiting, link)

    def close(self):
        """Closes every connection, and waits until the server has closed it, too."""
        left, waiting = self.links, {}
        self.links = []
        while left or waiting:
            while left and len(waiting) < WINDOW:
                link = left.pop()
                link.shutdown(socket.SHUT_WR)
                waiting[link] = time.monotonic()
                self.selector.register(link, selectors.EVENT_READ)
            for key, _ in self.events(waiting):
                check(key.fileobj.recv(100) == b"", "more came than was asked for")
                self.done(waiting, key.fileobj)
                key.fileobj.close()

    def events(self, waiting):
        events = self.selector.select(30)
        check(events, f"{len(waiting)} connections wait for an answer")
        return events

    def done(self, waiting, link):
        self.selector.unregister(link)
        self.slowest = max(self.slowest, time.monotonic() - waiting.pop(link))


def timed(times, name, work):
    begun = time.monotonic()
    result = work()
    times[name] = time.monotonic() - begun
    return result


def measure(mode, count):
    """Seconds of each phase, and other figures."""
    with tempfile.TemporaryDirectory(prefix="baton-scale-") as directory:
        scene = Scene(mode, Path(directory))
        try:
            client = Client(scene.serve())
            times, said = {}, {}
            timed(times, "open", lambda: client.open(count))
            if mode == "attach":
                attached(scene, client, times, said, count)
            else:
                for length in (100, 2000, 100):
                    timed(times, f"ask {length}", lambda: client.ask_all(length))
                if mode == "run":
                    try:
                        scene.await_that(lambda: on_nic(scene) == count, f"the move of {count} connections")
                    except programs.Wrong as failure:
                        raise programs.Wrong(f"{failure}: {where(scene)}") from failure
                known = timed(times, "list", scene.known)
                check(mode == "native" or len(known) == count, f"{len(known)} connections are known instead of {count}")
                said["on the NIC"] = sum(info["place"] == "nic" for info in known)
            said["slowest"] = round(client.slowest, 3)
            timed(times, "close", client.close)
            if mode in ("run", "flip"):
                scene.await_that(lambda: not scene.known(), "an empty list of connections")
        finally:
            scene.end()
        log = scene.directory / "baton.log"
        check(not log.exists() or not log.read_text(), f"Baton complains: {log.read_text() if log.exists() else ''}")
        if mode in ("run", "flip"):
            scene.await_that(lambda: not list(scene.directory.glob("baton-run-*")), "the end of Baton")
            report = json.loads(scene.report.read_text())
            said["moves"] = report["moves"]
            check((report["resets"], report["errors"]) == (0, 0), f"{report}")
        return times, said


def on_nic(scene):
    return sum(info["place"] == "nic" for info in scene.known())


def where(scene):
    """How many connections are in which place for which reason."""
    return dict(collections.Counter((info["place"], info["reason"]) for info in scene.known()))


def attached(scene, client, times, said, count):
    begun = time.monotonic()
    scene.attach(scene.server)
    ended = []

    # The server answers all the while.
    while on_nic(scene) < count:
        client.ask_all(100)
        # Waits: a limit that is far away.
        check(time.monotonic() - begun < 300, f"attaching does not come to an end: {where(scene)}")
    times["attach"] = time.monotonic() - begun
    said["on the NIC"] = on_nic(scene)
    timed(times, "ask 2000", lambda: client.ask_all(2000))

    def detach():
        scene.attacher.send_signal(signal.SIGINT)
        said["summary"] = json.loads(scene.attacher.communicate(timeout=300)[0])
        ended.append(True)

    detacher = threading.Thread(target=detach)
    begun = time.monotonic()
    detacher.start()
    while not ended and detacher.is_alive():
        client.ask_all(100)
    detacher.join()
    times["detach"] = time.monotonic() - begun
    check(scene.attacher.returncode == 0, "the attacher failed")


def trial(mode, few, many):
    rows = {}
    for count, rounds in ((few, ROUNDS), (many, 1)):
        measured = []
        for _ in range(rounds):
            times, said = measure(mode, count)
            each = ", ".join(f"{name} {taken / count * 1e6:.0f}" for name, taken in times.items())
            print(f"{mode:<7} {count:>5} connections, µs for each: {each}; {said}", flush=True)
            # Waits: how long a client waits is what is tested.
            check(said["slowest"] < PATIENCE, f"an answer took {said['slowest']} s")
            measured.append(times)
        rows[count] = {name: statistics.fmean(times[name] for times in measured) / count for name in measured[0]}
    # Costs that do not depend on the number are small with many connections.
    return {name: rows[many][name] / rows[few][name] for name in rows[few]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    many = int(os.environ.get("BATON_SCALE", "1000"))
    parser.add_argument("--only", help="of native, run, flip, attach", type=lambda text: text.split(","), default=["run", "flip", "attach"])
    parser.add_argument("--many", type=int, default=many)
    parser.add_argument("--few", type=int, default=many // 8)
    given = parser.parse_args()
    programs.isolate(__file__)
    # The server, this script, the agent and the keeper have a descriptor of each connection, an attacher two.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    failed = False
    for mode in given.only:
        try:
            growth = trial(mode, given.few, given.many)
            grown = {name: round(times, 1) for name, times in growth.items()}
            check(all(times < GROWTH for times in growth.values()), f"a connection costs so many times more with many: {grown}")
            print(f"{mode:<7} ok  {grown}", flush=True)
        except Exception as failure:  # noqa: BLE001 - the next mode is tried, too
            failed = True
            print(f"{mode:<7} FAILED  {type(failure).__name__}: {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

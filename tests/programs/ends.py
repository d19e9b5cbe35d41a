#!/usr/bin/env python3
"""Connections that end while the agent or the NIC of their program dies again and again: a server with a thread for each connection, which
all end at about the same moment in one of several ways (ends.c). What each side says that it has sent, the other must have read, byte by
byte, and then the end of the stream; both must come to an end. Natively, too.

    tests/programs/ends.py                                 # a round of each way, the agent killed all the time
    tests/programs/ends.py --rounds 60 --how half-server
    tests/programs/ends.py --kill nic
    tests/programs/ends.py --kill none --modes flip

Prints a line of JSON for each round. On loopback, in a network namespace of its own. It needs root and a C compiler.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import programs
from both_ways import MODES, process_of
from programs import BATON, HERE
from restarts import wait_for

HOWS = ("close", "small", "linger", "half-server", "half-client", "kill")
PORT = 7200
# Seconds between two deaths: as soon as the next agent has taken over, or a little later.
APART = (0.05, 0.2)
# Seconds in which a round's processes must end; a client gives up after 10 s without a byte.
PATIENCE = 60


class Killer(threading.Thread):
    """Kills a process of the Baton in `directory` again and again."""

    def __init__(self, directory, victim, seed):
        super().__init__()
        self.directory, self.victim, self.chance = directory, victim, random.Random(seed)
        self.killed, self.over = 0, threading.Event()

    def run(self):
        # Waits: until the next death, at another moment each time.
        while not self.over.wait(self.chance.uniform(*APART)):
            for door in self.directory.glob("baton-run-*/agent.sock"):
                process = process_of(door, self.victim)
                if process:
                    try:
                        os.kill(process, signal.SIGKILL)
                        self.killed += 1
                    except ProcessLookupError:
                        # It has ended with its program.
                        pass

    def end(self):
        self.over.set()
        self.join()


class Round:
    def __init__(self, given, directory, seed):
        self.given, self.directory, self.seed = given, directory, seed

    def run(self, how, mode):
        words = [str(word) for word in (self.directory / "ends", how, PORT, self.given.connections, self.seed)]
        log, said, report = (self.directory / name for name in ("log", "said", "report"))
        prefix = []
        if mode != "native":
            seed = ["--seed", str(self.seed)] if "flip" in MODES[mode][0] else []
            prefix = [str(BATON), "run", "--log", str(log), "--flip-report", str(report), *MODES[mode], *seed, "--"]
        environment = os.environ | {"TMPDIR": str(self.directory)}
        environment.pop("BATON_SOCKET", None)
        self.failures = []
        with open(said, "w") as out:
            options = {"stdin": subprocess.DEVNULL, "text": True, "env": environment}
            server = subprocess.Popen([*prefix, *words], stdout=out, start_new_session=True, **options)
            wait_for("the server", lambda: said.read_text().startswith("listening"))
            killer = Killer(self.directory, self.given.kill, self.seed)
            if mode != "native" and self.given.kill != "none":
                killer.start()
            client = subprocess.Popen([*words, "127.0.0.1"], stdout=subprocess.PIPE, start_new_session=True, **options)
            lines = self.wait("client", client, 0)
            # `baton run` ends by the signal that has ended its program.
            self.wait("server", server, -signal.SIGKILL if how == "kill" else 0)
            if killer.is_alive():
                killer.end()
        self.wait_for_baton()
        here, there = ([json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in (said.read_text(), lines))
        self.judge(how, here, there)
        if log.exists():
            if self.failures:
                self.failures.append(f"log: {log.read_text(errors='replace')[-1000:]!r}")
            log.unlink()
        moves = 0
        if report.exists():
            moves = json.loads(report.read_text() or '{"moves": 0}')["moves"]
            report.unlink()
        row = {"how": how, "mode": mode, "seed": self.seed, "connections": self.given.connections, "moves": moves, "killed": killer.killed}
        return row | {"failures": self.failures}

    def wait(self, name, process, status):
        """The process's output, when it has ended as it should."""
        try:
            out, _ = process.communicate(timeout=PATIENCE)
            if process.returncode != status:
                self.failures.append(f"the {name} ended with {process.returncode}")
        except subprocess.TimeoutExpired:
            self.failures.append(f"the {name} has not ended after {PATIENCE} s")
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        return out or ""

    def wait_for_baton(self):
        """A Baton ends when all that its program has left in its connections is sent."""
        try:
            wait_for("the end of its Baton", lambda: not any(self.directory.glob("baton-run-*")), PATIENCE)
        except SystemExit as error:
            self.failures.append(str(error))

    def judge(self, how, server, client):
        for name, links in (("server", server), ("client", client)):
            if len(links) != self.given.connections:
                self.failures.append(f"the {name} reported {len(links)} of {self.given.connections} connections")
            self.failures.extend(f"{name} {link}" for link in links if link["wrong"] or link["end"] != "end")
        servers = {link["number"]: link for link in server}
        for link in client:
            other = servers.get(link["number"])
            # A server that is killed reads nothing.
            if other and (link["received"] != other["sent"] or how != "kill" and link["sent"] != other["received"]):
                self.failures.append(f"not all bytes arrived: client {link}, server {other}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--how", type=lambda text: text.split(","), default=list(HOWS), help=f"of {', '.join(HOWS)}")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["eager", "flip"], help=f"of {', '.join(MODES)}")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--kill", choices=["agent", "nic", "none"], default="agent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    given = parser.parse_args()
    programs.isolate(__file__)
    failed = False
    with tempfile.TemporaryDirectory(prefix="baton-ends-") as directory:
        directory = Path(directory)
        directory.chmod(0o755)
        subprocess.run(["cc", "-O2", "-pthread", "-o", directory / "ends", HERE / "ends.c"], check=True)
        for seed in range(given.seed, given.seed + given.rounds):
            trial = Round(given, directory, seed)
            for how in given.how:
                for mode in ("native", *given.modes):
                    row = trial.run(how, mode)
                    failed |= bool(row["failures"])
                    print(json.dumps(row), flush=True)
                    if row["failures"] and (given.stop or mode == "native"):
                        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

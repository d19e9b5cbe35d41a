#!/usr/bin/env python3
"""Two hosts, each with a Baton of its own, and connections that both keep full in both directions (both_ways.c). Every byte is compared,
nothing may be reset or fail, and no connection may stand still longer than natively in the same round.

    tests/programs/both_ways.py                          # ten short rounds
    tests/programs/both_ways.py --rounds 100 --seconds 5
    tests/programs/both_ways.py --modes flip --connections 256
    tests/programs/both_ways.py --seconds 5 --kill-nic 2         # and of each Baton the NIC dies twice a round
    tests/programs/both_ways.py --seconds 5 --stop-nic 1 --kill-agent 1

It needs root and a C compiler, and makes network namespaces of its own.
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
from programs import BATON, HERE

# How the program runs on both hosts, besides natively.
MODES = {
    "flip": ["--flip", "1..50"],
    "eager": ["--rule", "established", "--eager"],
}
SERVER, CLIENT = "10.0.9.1", "10.0.9.2"
PORT = 7000
# A connection may stand still for so many seconds longer than the slowest natively in the same round.
STANDSTILL = 1.0
# Seconds without any progress after which a connection counts as stuck for good.
PATIENCE = 20
# What may happen to a Baton's processes, by the options' names: to which process, and by which signal.
FAULTS = {"kill_nic": ("nic", signal.SIGKILL), "stop_nic": ("nic", signal.SIGSTOP), "kill_agent": ("agent", signal.SIGKILL)}
# A connection may stand still for so many seconds longer where one of them dies meanwhile.
RECOVERY = 3


def within(holder, words):
    """The command, in the other host's namespace or in this one."""
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net", *map(str, words)] if holder else list(map(str, words))


def faults(given):
    """What is done to each Baton in a round: a process, and a signal."""
    return [fault for name, fault in FAULTS.items() for _ in range(getattr(given, name))]


def process_of(door, which):
    """The number of a Baton's process; None if it does not say."""
    command = {"nic": ["nic", "show"], "agent": ["stats"]}[which]
    shown = subprocess.run([BATON, *command, "--json", "--socket", door], capture_output=True, text=True)
    if shown.returncode != 0:
        return None
    said = json.loads(shown.stdout)
    return said["nics"][0]["process"] if which == "nic" else said[0]["agent_process"]


class Round:
    """The program on both hosts, in one mode after another."""

    def __init__(self, given, peer, directory, seed):
        self.given, self.peer, self.directory, self.seed = given, peer, directory, seed
        self.killed = 0

    def prefix(self, mode, side):
        if mode == "native":
            return []
        names = {name: self.directory / f"{side}.{name}" for name in ("log", "report")}
        options = [*MODES[mode], *(["--seed", self.seed] if "flip" in MODES[mode][0] else [])]
        return [BATON, "run", "--log", names["log"], "--flip-report", names["report"], *options, "--"]

    def run(self, mode, connections):
        """The two ends' connections, by number."""
        words = [self.directory / "both_ways", PORT, connections, self.given.seconds, PATIENCE]
        environment = os.environ | {"TMPDIR": str(self.directory)}
        environment.pop("BATON_SOCKET", None)
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True, "env": environment}
        server = subprocess.Popen(within(None, [*self.prefix(mode, "server"), *words]), **options)
        server.stdout.readline()
        client = subprocess.Popen(within(self.peer, [*self.prefix(mode, "client"), *words, SERVER]), **options)
        ends, self.failures, self.killed = [], [], 0
        killers = [self.begin_to_kill(side) for side in range(2)] if mode != "native" and faults(self.given) else []
        for name, process in (("client", client), ("server", server)):
            out, _ = process.communicate(timeout=self.given.seconds + 10 * PATIENCE)
            if process.returncode != 0:
                self.failures.append(f"the {name} ended with {process.returncode}")
            ends.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
        for killer in killers:
            killer.join()
        # The Batons end with their programs, when all that these closed has been sent.
        before = time.monotonic()
        while any(self.directory.glob("baton-run-*")):
            if time.monotonic() - before > 60:
                self.failures.append("a Baton has not ended a minute after its program")
                break
            # Waits: between two looks; the limit is a minute.
            time.sleep(0.01)
        return self.judge(mode, connections, *ends)

    def begin_to_kill(self, side):
        """Kills or stops processes of one Baton at random moments, in a thread of its own."""
        chance = random.Random(f"{self.seed} {side}")
        moments = sorted((chance.uniform(0, self.given.seconds), fault) for fault in faults(self.given))

        def kill():
            begin = time.monotonic()
            for moment, (victim, number) in moments:
                # Waits: until the next of these moments.
                time.sleep(max(0, begin + moment - time.monotonic()))
                doors = sorted(self.directory.glob("baton-run-*/agent.sock"))
                process = process_of(doors[side], victim) if side < len(doors) else None
                if process:
                    os.kill(process, number)
                    self.killed += 1

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def judge(self, mode, connections, client, server):
        for side, links in (("client", client), ("server", server)):
            if len(links) != connections:
                self.failures.append(f"the {side} reported {len(links)} of {connections} connections")
            for link in links:
                if link["wrong"]:
                    self.failures.append(f"{side} {link['number']}: wrong bytes {link['first_wrong']}")
                if link["end"] != "done":
                    self.failures.append(f"{side} {link['number']}: {link['end']}, sent {link['sent']}, received {link['received']}")
        servers = {link["number"]: link for link in server}
        for link in client:
            other = servers.get(link["number"])
            if other and (link["sent"], link["received"]) != (other["received"], other["sent"]) and link["end"] == other["end"] == "done":
                self.failures.append(f"{link['number']}: client {link}, server {other}: not all bytes arrived")
        for log in sorted(self.directory.glob("*.log")):
            said = log.read_text(errors="replace")[-1000:]
            log.unlink()
            if self.failures and said:
                self.failures.append(f"{log.name}: {said!r}")
        moves = 0
        for report in self.directory.glob("*.report"):
            text = report.read_text()
            report.unlink()
            if text:
                moves += json.loads(text)["moves"]
        links = client + server
        self.slowest = sorted(([side, *link.values()] for side, links in (("client", client), ("server", server)) for link in links), key=lambda link: -link[4])
        return {
            "mode": mode,
            "connections": connections,
            "megabytes": sum(link["received"] for link in links) >> 20,
            "longest_ms": max((link["longest_ms"] for link in links), default=0),
            "moves": moves,
            "killed": self.killed,
            "failures": self.failures,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each connection sends")
    parser.add_argument("--connections", type=lambda text: [int(word) for word in text.split(",")], default=[32, 256])
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}", type=lambda text: text.split(","), default=["flip", "eager"])
    parser.add_argument("--longer", type=float, default=STANDSTILL,
                        help="seconds that a connection may stand still longer than natively in the same round")
    parser.add_argument("--kill-nic", type=int, default=0, help="how often the NIC of each Baton is killed in a round")
    parser.add_argument("--stop-nic", type=int, default=0, help="how often it is stopped for good")
    parser.add_argument("--kill-agent", type=int, default=0, help="how often the agent of each Baton is killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    given = parser.parse_args()
    programs.isolate(__file__)
    peer = programs.namespace()
    for words in (
        f"ip link add eth0 type veth peer name eth0 netns {peer.pid}",
        f"ip address add {SERVER}/24 dev eth0",
        "ip link set eth0 up",
    ):
        subprocess.run(words.split(), check=True)
    for words in (f"ip address add {CLIENT}/24 dev eth0", "ip link set eth0 up", "ip link set lo up"):
        subprocess.run(within(peer, words.split()), check=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="baton-both-ways-") as directory:
        directory = Path(directory)
        directory.chmod(0o755)
        subprocess.run(["cc", "-O2", "-pthread", "-o", directory / "both_ways", HERE / "both_ways.c"], check=True)
        for number in range(given.rounds):
            for connections in given.connections:
                trial = Round(given, peer, directory, given.seed + number)
                native = trial.run("native", connections)
                if native["failures"]:
                    print(json.dumps(native | {"round": number}), flush=True)
                    return 1
                for mode in given.modes:
                    row = trial.run(mode, connections) | {"round": number, "native_longest_ms": native["longest_ms"]}
                    longer = given.longer + (RECOVERY if faults(given) else 0)
                    if row["longest_ms"] > native["longest_ms"] + longer * 1000:
                        row["failures"].append(f"a connection stood still for {row['longest_ms']} ms, natively for {native['longest_ms']} ms: {trial.slowest[:4]}")
                    failed |= bool(row["failures"])
                    print(json.dumps(row), flush=True)
                    if row["failures"] and given.stop:
                        return 1
    peer.stdin.close()
    peer.wait()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

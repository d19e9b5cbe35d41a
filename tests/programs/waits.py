#!/usr/bin/env python3
"""Copies of one program beside each other, each in a network namespace of its own with a Baton of its own, until the processors are busy.
The program (bin/baton/tests/c/waits.c) has threads that sleep in every call that waits for a connection, compares every byte, and fails if a
call says what it could not say natively, or hangs. One copy more runs natively in each round: if that fails, the run ends there and fails.
With --program children it is another one (bin/baton/tests/programs/children.py), which forks all the time.

    tests/programs/waits.py                                  # five rounds, two copies for each processor
    tests/programs/waits.py --copies 10 --total-seconds 1200
    tests/programs/waits.py --rule accepted,flip:0..2
    tests/programs/waits.py --program children --rule flip
    tests/programs/waits.py --seed 3407 --rounds 1           # a round again, as a failure prints it

A rule is one of `baton run --rule`, or flip[:MIN..MAX]. The copies take the rules in turn, by their seeds, which are those of the commit unless
they are given. Prints a line of JSON for each round; a failure has its seed and rule, what was printed, and the command to repeat the round.
It needs root and a C compiler.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs
from both_ways import within
from programs import BATON, HERE

TESTS = HERE.parent.parent / "bin/baton/tests"
# What copies may run, by name. Each gets a number of seconds and a seed, and prints a number of connections.
PROGRAMS = ("waits", "children")
RULES = "accepted,bytes:10500,requests:3,flip"
NATIVE = "native"
# Seconds that a copy may take longer than it was given. By itself it gives up when a connection has hung for 10.
PATIENCE = 60
# By chance no connection of a copy is worth a move before it ends. That so many copies in turn have had none is none.
ENOUGH = 5
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def commit_seed():
    """As the Makefile's: each commit has others."""
    if given := os.environ.get("BATON_FUZZ_SEED"):
        return int(given)
    try:
        said = subprocess.run(["git", "-C", HERE, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True).stdout
    except OSError:
        said = ""
    return int(said or "1", 16)


def options(rule, seed):
    """What `baton run` is told."""
    if rule == "flip" or rule.startswith("flip:"):
        return ["--flip", rule[len("flip:"):] or "1..5", "--seed", seed]
    return ["--rule", rule]


class Copy:
    """The program, under a rule or natively. Whatever it has started ends with it."""

    def __init__(self, program, seconds, seed, rule, directory):
        self.seed, self.rule, self.directory = seed, rule, directory
        self.log, self.report, self.said = (directory / name for name in ("log", "report", "said"))
        self.process, self.failures, self.connections, self.moves = None, [], 0, 0
        words = [*program, seconds, seed]
        if rule != NATIVE:
            words = [BATON, "run", "--eager", "--log", self.log, "--flip-report", self.report, *options(rule, seed), "--", *words]
        self.words = words
        directory.mkdir()
        self.holder = programs.namespace()
        self.inode = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino

    def __enter__(self):
        subprocess.run(within(self.holder, "ip link set lo up".split()), check=True)
        return self

    def start(self):
        environment = os.environ | {"TMPDIR": str(self.directory)}
        environment.pop("BATON_SOCKET", None)
        with open(self.said, "w") as said:
            kept = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True, "env": environment}
            self.process = subprocess.Popen(within(self.holder, self.words), **kept)

    def finish(self, deadline):
        """Waits for the program and its Baton, and judges them."""
        try:
            self.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.failures += ["it has not ended", self.stands()]
            return
        end = time.monotonic() + PATIENCE
        while any(self.directory.glob("baton-run-*")):
            if time.monotonic() > end:
                self.failures += [f"its Baton has not ended {PATIENCE} seconds after it", self.stands()]
                return
            # Waits: between two looks; the limit is far away.
            time.sleep(0.02)
        self.judge()

    def judge(self):
        said, log = (path.read_text(errors="replace") if path.exists() else "" for path in (self.said, self.log))
        if self.process.returncode != 0:
            self.failures.append(f"it has ended with {self.process.returncode}")
        elif not said.strip().isdigit():
            self.failures.append("it has printed more than a number")
        else:
            self.connections = int(said)
        if log:
            self.failures.append("its Baton's log is not empty")
        if self.rule == NATIVE:
            return
        report = json.loads(self.report.read_text() or "{}") if self.report.exists() else {}
        self.moves = report.get("moves", 0)
        self.failures += [f"{report.get(what)} {what}" for what in ("resets", "errors") if report.get(what) != 0]

    def processes(self):
        """The processes in its namespace, the holder's apart, each with a pidfd that names no other one later."""
        for entry in Path("/proc").glob("[0-9]*"):
            # One that has ended is none.
            with contextlib.suppress(OSError):
                number = int(entry.name)
                process = os.pidfd_open(number)
                try:
                    if number != self.holder.pid and os.stat(entry / "ns/net").st_ino == self.inode:
                        yield number, process
                finally:
                    os.close(process)

    def stands(self):
        """Where the threads of its processes stand."""
        found = []
        for number, _ in self.processes():
            for task in Path(f"/proc/{number}/task").glob("*"):
                with contextlib.suppress(OSError):
                    found.append(" ".join((task / name).read_text().split("\n")[0] for name in ("comm", "wchan", "syscall")))
        return "; ".join(found)

    def __exit__(self, *_):
        any_left = True
        while any_left:
            any_left = False
            for _, process in self.processes():
                any_left = True
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            if any_left:
                # Waits: between two looks; what is killed is gone soon.
                time.sleep(0.01)
        if self.process:
            self.process.wait()
        self.holder.stdin.close()
        self.holder.wait()

    def found(self, repeat):
        """What has gone wrong, and how to see it again."""
        printed = {path.name: path.read_text(errors="replace")[-4000:] for path in (self.said, self.log, self.report) if path.exists()}
        return {"seed": self.seed, "rule": self.rule, "failures": self.failures} | printed | {"repeat": repeat}


def play(given, program, first, number, directory):
    """A round: copies with seeds from `first` on, and a native one. Returns all of them."""
    rules = [given.rule[seed % len(given.rule)] for seed in range(first, first + given.copies)]
    with contextlib.ExitStack() as stack:
        plan = [*zip(range(first, first + given.copies), rules), (first, NATIVE)]
        copies = []
        for at, (seed, rule) in enumerate(plan):
            place = directory / f"{number}.{at}"
            copies.append(stack.enter_context(Copy(program, given.seconds, seed, rule, place)))
        for copy in copies:
            copy.start()
        deadline = time.monotonic() + given.seconds + PATIENCE
        for copy in copies:
            copy.finish(deadline)
    return copies


def repeat(given, first):
    """The command for a round's seeds and rules, beside as many copies."""
    words = ["tests/programs/waits.py", "--program", given.program, "--copies", given.copies, "--seconds", given.seconds, "--rule", ",".join(given.rule)]
    words += ["--seed", first, "--rounds", 1]
    program = [f"BATON_PROGRAM={os.environ['BATON_PROGRAM']}"] if "BATON_PROGRAM" in os.environ else []
    return shlex.join([*program, *map(str, words)])


def end_by(number, _frame):
    """Leaves by way of every `__exit__`, which no further signal cuts short."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(128 + number)


def prepare(name, directory):
    """The words that start a program without its arguments; one in C is compiled."""
    script = TESTS / "programs" / f"{name}.py"
    if script.exists():
        return ["python3", script]
    program = directory / name
    subprocess.run(["cc", "-O2", "-std=gnu11", "-pthread", "-o", program, TESTS / "c" / f"{name}.c"], check=True)
    return [program]


def run(given, directory):
    """All rounds. Returns whether nothing has failed."""
    program = prepare(given.program, directory)
    good, number, end = True, 0, time.monotonic() + (given.total_seconds or 0)
    ran, moved = dict.fromkeys(given.rule, 0), dict.fromkeys(given.rule, 0)
    while time.monotonic() < end if given.total_seconds else number < given.rounds:
        first, begun = given.seed + number * given.copies, time.monotonic()
        *copies, native = play(given, program, first, number, directory)
        for copy in copies:
            ran[copy.rule] += 1
            moved[copy.rule] += copy.moves
        row = {"round": number, "seed": first, "copies": given.copies, "took": round(time.monotonic() - begun, 1)}
        row |= {"connections": sum(copy.connections for copy in copies), "moves": sum(copy.moves for copy in copies)}
        row |= {"native_connections": native.connections}
        row["failures"] = [copy.found(repeat(given, first)) for copy in (*copies, native) if copy.failures]
        print(json.dumps(row), flush=True)
        good &= not row["failures"]
        if native.failures or given.stop and not good:
            return False
        number += 1
    still = [rule for rule in given.rule if ran[rule] >= ENOUGH and moved[rule] == 0]
    if still:
        print(json.dumps({"failures": [f"{ran[rule]} copies under {rule}, and no connection has moved" for rule in still]}), flush=True)
    return good and not still


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, default=PROGRAMS[0], help="that the copies run")
    parser.add_argument("--copies", type=int, default=2 * len(os.sched_getaffinity(0)), help="besides the native one (two for each processor)")
    parser.add_argument("--seconds", type=float, default=2, help="for which each copy makes connections")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total-seconds", type=float, help="begin rounds for so long, however many these are")
    parser.add_argument("--rule", type=lambda text: text.split(","), default=RULES.split(","), help=f"rules of the copies ({RULES})")
    parser.add_argument("--seed", type=int, help="that of the first copy")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    given = parser.parse_args()
    if given.seed is None:
        given.seed = commit_seed()
    for ending in ENDING:
        # nohup(1) ignores one.
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, end_by)
    with tempfile.TemporaryDirectory(prefix="baton-waits-") as directory:
        directory = Path(directory)
        directory.chmod(0o755)
        return 0 if run(given, directory) else 1


if __name__ == "__main__":
    sys.exit(main())

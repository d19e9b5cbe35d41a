#!/usr/bin/env python3
"""nginx and redis under load, with `--rule accepted`, while the NIC that has their connections is killed (SIGKILL) and stopped for good
(SIGSTOP) at random moments, at least four seconds apart. What `baton soak --beside --kill-nic N --stop-nic N` asks of its own streams must
hold for the programs' clients, too: no wrong byte, no reset, no connection lost; nine tenths of the connections are on the NIC again after
three seconds; and after a fault a request takes at most a second longer (one in a hundred: three) than the longest natively in the same run.

Prints a line of JSON for each program. Everything on loopback, in a network namespace of its own. Run as root.

    tests/programs/deaths.py [--kill-nic 10] [--stop-nic 10] [--seed 1]
"""
import argparse, contextlib, json, os, pathlib, random, shutil, signal, subprocess, sys, tempfile, time

from restarts import BATON, KINDS, Differs, Load, go_inside, listed, reachable, wait_for

# Connections of each program that stay, that are made anew again and again, and of its native twin.
KEPT, RENEWED, NATIVE = 16, 2, 2
# Seconds between two requests of one.
PACE = 0.005
# Seconds after a fault at which connections are to be on the NIC again, at which its gaps are read, and at which there may be another.
BACK, GAPS, APART = 3, 3.5, 4


class Pair:
    """A program under Baton and without, with the clients of both."""

    def __init__(self, kind, number, directory, door):
        self.directories = [directory / kind.name / place for place in ("here", "native")]
        for place in self.directories:
            place.mkdir(parents=True)
        here, native = (kind(place, 8000 + 100 * number + at) for at, place in enumerate(self.directories))
        self.name, self.servers, self.report = kind.name, (here, native), directory / f"{kind.name}.json"
        prefix = [BATON, "run", "--socket", door, "--rule", "accepted", "--flip-report", self.report, "--"]
        self.processes = [self.start([*prefix, *here.command]), self.start(native.command)]
        self.kept, self.renewed, self.native = [], [], []
        # Seconds of the longest request after each fault, on each connection; the wanted connections, and those of them on the NIC.
        self.gaps, self.native_gaps, self.wanted, self.back = [], [], 0, 0

    def start(self, command):
        return subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def begin(self):
        for server in self.servers:
            wait_for(self.name, lambda server=server: reachable(server.port))
        here, native = self.servers
        self.kept = [Load(here, False, PACE) for _ in range(KEPT)]
        self.renewed = [Load(here, True, PACE) for _ in range(RENEWED)]
        self.native = [Load(native, False, PACE) for _ in range(NATIVE)]

    def on_nic(self, door):
        """How many of the connections that stay are on the NIC."""
        places = {one["peer"].rsplit(":", 1)[1]: one["place"] for one in listed(door)}
        return sum(places.get(str(load.port)) == "nic" for load in self.kept)

    def look(self, door):
        self.wanted += len(self.kept)
        self.back += self.on_nic(door)

    def take_gaps(self, count=True):
        for loads, gaps in ((self.kept + self.renewed, self.gaps), (self.native, self.native_gaps)):
            longest = [load.take_longest() for load in loads]
            gaps.extend(longest if count else [])

    def end(self):
        loads = self.kept + self.renewed + self.native
        for load in loads:
            load.over = True
        for load in loads:
            load.join(15)
        self.stop()
        wait_for("the report", lambda: json.loads(self.report.read_text() or "{}").get("connections"))

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)

    def result(self):
        loads = self.kept + self.renewed
        failed = [error for load in loads for error in load.failed]
        native = percentiles(self.native_gaps)
        usual = sorted(self.native_gaps)[len(self.native_gaps) // 2]
        return {
            "program": self.name,
            "requests": sum(load.done for load in loads),
            "failed": len(failed),
            "errors": sorted({repr(error) for error in failed})[:3],
            "failed_natively": sum(len(load.failed) for load in self.native),
            "mismatches": sum(isinstance(error, Differs) for error in failed),
            "resets_seen_by_peer": sum(isinstance(error, ConnectionError) for error in failed),
            "connections_lost": json.loads(self.report.read_text())["resets"],
            "back_on_nic": self.back / self.wanted if self.wanted else None,
            "blackout_us": percentiles([max(0, gap - usual) for gap in self.gaps]),
            "native_gap_us": native,
        }


def percentiles(seconds):
    ordered = sorted(round(1e6 * one) for one in seconds)
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


def is_clean(result):
    usual, blackout = result["native_gap_us"]["max"], result["blackout_us"]
    carries = blackout["p99"] <= usual + 1_000_000 and blackout["max"] <= usual + 3_000_000
    return carries and not result["failed"] and not result["connections_lost"] and result["back_on_nic"] >= 0.9


def nic(door):
    said = subprocess.run([BATON, "nic", "show", "--json", "--socket", door], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["nics"][0]


@contextlib.contextmanager
def under_load(directory):
    """Baton, and the programs, whose clients ask until the end. Gives the agent's socket and the programs."""
    door = str(directory / "door/agent.sock")
    pairs, up = [], subprocess.Popen([BATON, "up", "--socket", door])
    try:
        wait_for("baton up", lambda: os.path.exists(door))
        pairs = [Pair(kind, number, directory, door) for number, kind in enumerate(KINDS.values())]
        for pair in pairs:
            pair.begin()
        for pair in pairs:
            wait_for("its connections on the NIC", lambda pair=pair: pair.on_nic(door) == KEPT)
        yield door, pairs
    finally:
        for pair in pairs:
            pair.stop()
        up.terminate()
        up.wait(20)


@contextlib.contextmanager
def scratch(name):
    """A directory for the programs' files, in which nginx's workers are another user's."""
    os.umask(0o022)
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def strike(pairs, fault, chance, door):
    # Waits: at another moment each time.
    time.sleep(0.5 * chance.random())
    for pair in pairs:
        pair.take_gaps(count=False)
    victim, struck = nic(door)["process"], time.monotonic()
    os.kill(victim, fault)
    wait_for("the next NIC", lambda: nic(door)["process"] != victim)

    def at(seconds):
        # Waits: until this long after the fault.
        time.sleep(max(0, struck + seconds - time.monotonic()))

    at(BACK)
    for pair in pairs:
        pair.look(door)
    at(GAPS)
    for pair in pairs:
        pair.take_gaps()
    at(APART)


def run(arguments, directory):
    chance = random.Random(arguments.seed)
    faults = [signal.SIGKILL] * arguments.kill_nic + [signal.SIGSTOP] * arguments.stop_nic
    chance.shuffle(faults)
    with under_load(directory) as (door, pairs):
        for fault in faults:
            strike(pairs, fault, chance, door)
        hung = nic(door)["hung"]
        for pair in pairs:
            pair.end()
        results = [pair.result() | {"kills": arguments.kill_nic, "stops": arguments.stop_nic, "hung": hung} for pair in pairs]
    for result in results:
        print(json.dumps(result), flush=True)
    return all(map(is_clean, results)) and hung == arguments.stop_nic


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill-nic", type=int, default=10, help="times that the NIC is killed")
    parser.add_argument("--stop-nic", type=int, default=10, help="times that it is stopped for good")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        go_inside()
    with scratch("deaths") as directory:
        sys.exit(0 if run(arguments, directory) else 1)


if __name__ == "__main__":
    main()

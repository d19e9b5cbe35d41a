#!/usr/bin/env python3
"""nginx and redis under load, with `--rule accepted`, while Baton's processes get few processors or stand still for a while, none of which
is their fault: no NIC and no agent may be ended for it, no answer be wrong and no connection reset.

    hogs        four processes use up the processors
    fifo        a process of real-time priority uses up the first processor, on which keeper, agent and NIC are
    quota       keeper, agent and NIC are in a control group with a tenth of a processor (cpu.max, or cpu.cfs_quota_us)
    stopped     agent and NIC are stopped (SIGSTOP) together for a second, every two seconds

Prints a line of JSON for each. Everything on loopback, in a network namespace of its own. Run as root.

    tests/programs/starved.py [--seconds 600] [--only hogs,quota]
"""
import argparse, contextlib, json, os, pathlib, signal, subprocess, sys, time

from deaths import nic, scratch, under_load
from restarts import go_inside

SPIN = ["sh", "-c", "while :; do :; done"]


def parent(process):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()[1])


@contextlib.contextmanager
def spinning(commands):
    # Each in a session of its own, as those of different users are: the kernel shares out the processors among sessions first.
    spinners = [subprocess.Popen(command, start_new_session=True) for command in commands]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def hogs(_processes, _directory):
    return spinning([SPIN] * 4)


@contextlib.contextmanager
def fifo(processes, _directory):
    for process in processes:
        subprocess.run(["taskset", "-a", "-c", "-p", "0", str(process)], check=True, stdout=subprocess.DEVNULL)
    with spinning([["taskset", "-c", "0", "chrt", "--fifo", "1", *SPIN]]):
        yield


@contextlib.contextmanager
def quota(processes, directory):
    mount = directory / "groups"
    mount.mkdir()
    old = subprocess.run(["mount", "-t", "cgroup", "-o", "cpu", "none", mount], stderr=subprocess.DEVNULL).returncode == 0
    if not old:
        subprocess.run(["mount", "-t", "cgroup2", "none", mount], check=True)
        (mount / "cgroup.subtree_control").write_text("+cpu")
    group = mount / f"baton-{os.getpid()}"
    group.mkdir()
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
        for process in processes:
            (group / "cgroup.procs").write_text(str(process))
        yield
        if "nr_throttled 0\n" in (group / "cpu.stat").read_text():
            raise SystemExit("quota: Baton has used less, and never had to wait")
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (mount / "cgroup.procs").write_text(process)
        group.rmdir()
        subprocess.run(["umount", mount], check=True)


def stop_for_a_second(processes):
    for process in processes[1:]:
        os.kill(process, signal.SIGSTOP)
    # Waits: as long as both are stopped.
    time.sleep(1)
    for process in processes[1:]:
        os.kill(process, signal.SIGCONT)


CASES = {"hogs": hogs, "fifo": fifo, "quota": quota, "stopped": lambda _processes, _directory: contextlib.nullcontext()}


def run(name, seconds, directory):
    with under_load(directory) as (door, pairs):
        before = nic(door)
        agent = parent(before["process"])
        processes = [parent(agent), agent, before["process"]]
        with CASES[name](processes, directory):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if name == "stopped":
                    stop_for_a_second(processes)
                # Waits: the time for which it lasts.
                time.sleep(min(1, max(0, end - time.monotonic())))
        after = nic(door)
        ends = int(after["process"] != before["process"]) + int(parent(after["process"]) != agent)
        for pair in pairs:
            pair.take_gaps()
            pair.end()
        results = [pair.result() for pair in pairs]
    result = {"case": name, "seconds": seconds, "ends": ends, "hung": after["hung"], "starved": after["starved"], "programs": results}
    print(json.dumps(result), flush=True)
    wrong = sum(one["mismatches"] + one["resets_seen_by_peer"] + one["connections_lost"] for one in results)
    return ends == 0 and after["hung"] == 0 and wrong == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of each")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        go_inside()
    with scratch("starved") as directory:
        good = [run(name, arguments.seconds, place(directory, name)) for name in arguments.only.split(",")]
        sys.exit(0 if all(good) else 1)


def place(directory, name):
    (directory / name).mkdir()
    return directory / name


if __name__ == "__main__":
    main()

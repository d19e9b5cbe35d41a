#!/usr/bin/env python3
"""What fork costs a process with many connections: natively, with all of them managed in the kernel, and with all of them on the NIC, in turn
in the same run (bin/baton/tests/c/fork_cost.c; both ends are the process's). The medians of the rounds count: in the kernel a fork may take 5 ms
longer than natively, on the NIC twice as long.

    tests/programs/fork_cost.py                                   # 10,000 connections, five rounds
    tests/programs/fork_cost.py --connections 2000 --rounds 3 --most 4

Prints a line of JSON. On loopback, in network namespaces of its own. It needs root, a C compiler, and twice as many descriptors
(ulimit -n).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from programs import BATON, HERE

SOURCE = HERE.parent.parent / "bin/baton/tests/c/fork_cost.c"
# How the program runs: the arguments of `baton run`, and the program's last one. No connection carries as much as the rule `hot` asks for here.
MODES = {
    "native": (None, []),
    "kernel": (["--eager", "--rule", "hot:3G"], []),
    "nic": (["--eager", "--rule", "established"], ["moved"]),
}
# Microseconds that a fork may take longer than natively with connections in the kernel.
IN_KERNEL = 5_000


def fork(mode, connections, directory):
    """The least of some forks: microseconds in the parent, and in the child, and page faults of the parent's."""
    arguments, last = MODES[mode]
    words = [directory / "fork_cost", connections, *last]
    if arguments is not None:
        words = [BATON, "run", "--log", directory / "log", *arguments, "--", *words]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    environment = os.environ | {"TMPDIR": str(directory)}
    environment.pop("BATON_SOCKET", None)
    ran = subprocess.run([*alone, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True)
    if ran.returncode != 0:
        sys.exit(f"{mode}: the program ended with status {ran.returncode}")
    return [int(number) for number in ran.stdout.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=2.0, help="how many times as long as natively a fork may take, with connections on the NIC")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-fork-cost-") as name:
        directory = Path(name)
        command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-std=gnu11", "-pthread", "-o", directory / "fork_cost", SOURCE]
        subprocess.run(command, check=True)
        took = {mode: [] for mode in MODES}
        for _ in range(given.rounds):
            for mode in MODES:
                took[mode].append(fork(mode, given.connections, directory))
    medians = ({mode: statistics.median(least[which] for least in rounds) for mode, rounds in took.items()} for which in range(3))
    parents, childs, faults = medians
    wrong = []
    if parents["kernel"] > parents["native"] + IN_KERNEL:
        wrong.append("in the kernel")
    if parents["nic"] > given.most * parents["native"]:
        wrong.append("on the NIC")
    print(json.dumps({"connections": given.connections, "parent": parents, "child": childs, "faults": faults, "too_slow": wrong}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

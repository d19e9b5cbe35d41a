#!/usr/bin/env python3
"""scripts/apt-get waits for a package manager that holds any of apt's locks, says so, and goes on when it is released.

Needs root. The locks are held by this process; nothing is installed or removed, and no list is fetched."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

APT = Path(__file__).resolve().parents[2] / "scripts/apt-get"
NO_SOURCES = ["-o", "Dir::Etc::sourcelist=/dev/null", "-o", "Dir::Etc::sourceparts=/dev/null", "-o", "APT::Get::List-Cleanup=0"]
INSTALL = ["install", "-qy", "apt"]
CASES = {
    "/var/lib/apt/lists/lock": [*NO_SOURCES, "update", "-q"],
    "/var/lib/dpkg/lock-frontend": INSTALL,
    "/var/lib/dpkg/lock": INSTALL,
    "/var/cache/apt/archives/lock": ["clean"],
}


def waits_for(lock, arguments):
    """Runs apt-get while `lock` is held, until it says that it waits; then releases the lock. Returns its exit code."""
    with open(lock, "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        apt = subprocess.Popen([APT, *arguments], stderr=subprocess.PIPE, text=True)
        said = apt.stderr.readline()
        assert "Another package manager is at work" in said, f"{lock}: {said!r}"
        assert apt.poll() is None, f"{lock}: it did not wait"
    apt.communicate()
    return apt.returncode


def gives_up(lock, arguments):
    """While `lock` is held for longer than it may wait, apt-get fails with apt's own words."""
    with open(lock, "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        environment = {**os.environ, "BATON_APT_SECONDS": "1"}
        ended = subprocess.run([APT, *arguments], env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
        assert ended.returncode != 0 and "Could not get lock" in ended.stderr, ended


def main():
    if os.geteuid() != 0:
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print("locks: skipped, apt's locks are root's")
        return
    for lock, arguments in CASES.items():
        code = waits_for(lock, arguments)
        assert code == 0, f"{lock}: apt-get ended with {code}"
    gives_up("/var/lib/apt/lists/lock", CASES["/var/lib/apt/lists/lock"])
    print(f"locks: apt-get waited for each of {len(CASES)} locks")


if __name__ == "__main__":
    sys.exit(main())

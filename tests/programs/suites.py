#!/usr/bin/env python3
"""Python's own test suites, natively and under `baton run --flip 1..50`. Each test must have the same result, and every connection that
lived longer than the longest interval must have moved, except those that had to stay.

    tests/programs/suites.py                        # asyncio, selectors, ssl, http, ftplib, imaplib
    tests/programs/suites.py test_ssl test_poplib
    tests/programs/suites.py test_asyncio --match '*sendfile*'
    tests/programs/suites.py --full                 # full offload: servers and clients on two hosts (two_hosts.py)
    tests/programs/suites.py --full --network own   # the same at an address of the NIC's own

It needs root, and a Python that has its tests (Debian's package libpython3-testsuite).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from pathlib import Path

import programs

BATON = Path(os.environ.get("BATON_PROGRAM", Path(__file__).resolve().parent.parent.parent / "target/release/baton"))
SUITES = "test_selectors test_httplib test_httpservers test_ftplib test_imaplib test_ssl test_asyncio".split()
# Suites whose servers and clients can be on two hosts.
FULL = "test_socket test_asyncio test_httplib test_httpservers test_smtplib test_poplib test_telnetlib test_ssl".split()
# The first's client's RST has to overtake an event between two threads, which across a wire it does not always do, natively neither.
# The second waits for ever on a machine whose VM sockets cannot reach the machine itself, natively too. The third fails natively as
# often as the server's RST comes before the client's close.
LEFT_OUT = ("test_preauth_data_to_tls_server", "ThreadedVSOCKSocketStreamTest", "*StreamTests.test_unhandled_exceptions")
FAILED = ("error", "failure")
LONGEST = 50
# A connection is registered a moment after it was made, and moved a moment after its move is due.
SLACK = 50
# A burst of some hundred connections is more than the agent moves in the longest interval. None may wait longer than this.
NO_TIME, LONGEST_BURST = "than the agent has time for", 1000
# Allowed reasons for a connection that lived on and never moved: only the kernel can do these.
STAYS = ("CLOSED", "MSG_OOB", "shutdown of receiving", "fork", "exec", "inherited", "SCM_RIGHTS", "end of both streams")


def results(prefix, suite, directory, match, runner=("-m", "test"), left_out=()):
    """Each test's result and what it says of a failure, of those whose names match the pattern if there is one."""
    report = directory / "results.xml"
    chosen = ["--match", match] if match else []
    # Chosen before some are left out: Python begins with all tests if the first of these options leaves some out.
    command = [*prefix, sys.executable, *runner, *chosen, *(f"--ignore={name}" for name in left_out), "--timeout", "300", "--junit-xml", str(report), suite]
    with open(directory / "messages", "wb") as messages:
        subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, timeout=900, check=False)
    found = {}
    if not report.exists():
        # A test ran into its time limit.
        return found
    for case in tree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}.{case.get('name')}"
        result = ",".join(sorted({child.tag for child in case} - {"system-out", "system-err"})) or case.get("result", "passed")
        found[name] = result, "".join(child.text or "" for child in case if child.tag in FAILED)
    return found


def differences(native, ours):
    """The tests with another result than natively. What those that fail say is written to standard error."""
    nothing = (None, "")
    wrong = []
    for name in sorted(native.keys() | ours.keys()):
        (before, _), (after, text) = native.get(name, nothing), ours.get(name, nothing)
        if before != after:
            wrong.append(f"{name}: {before} became {after}")
            if text:
                print(f"{name}:\n{text}", file=sys.stderr, flush=True)
    return wrong


def full(suites, network, match):
    """The suites in full offload, with their servers on the host with the NIC and their clients on the other one, and the other way round."""
    programs.isolate(__file__, network)
    programs.build(network)
    here, there = (f"/proc/{process}/ns/net" for process in (os.getpid(), programs.CONTAINER.pid))
    failed = False
    for suite in suites or FULL:
        for end in ("server", "client"):
            start, servers = ([], (there, programs.REACHED)) if end == "server" else (programs.inside(), (here, programs.OURS))
            runner = (str(Path(__file__).parent / "two_hosts.py"), *servers)
            with tempfile.TemporaryDirectory(prefix="baton-suites-") as directory:
                directory = Path(directory)
                native = results(start, suite, directory, match, runner, LEFT_OUT)
                before = programs.made_by_nic()
                ours = results([*start, str(BATON), "run", "--offload", "full", "--"], suite, directory, match, runner, LEFT_OUT)
                made = programs.made_by_nic() - before
            wrong = differences(native, ours)
            failed |= bool(wrong) or not native
            failing = sum(result in FAILED for result, _ in native.values())
            print(f"{suite:<18} {end} {len(native):>5} tests, {failing:>3} fail natively  {made:>4} connections made by the NIC  {'; '.join(wrong) or 'the same'}", flush=True)
    return 1 if failed else 0


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("suites", nargs="*", metavar="SUITE", help="suites by their names, test_ssl for example")
    arguments.add_argument("--full", action="store_true", help="in full offload, with servers and clients on two hosts")
    arguments.add_argument("--network", choices=programs.WIRES, default="wire", help="with --full: the NIC's host's address, or the NIC's own")
    arguments.add_argument("--match", metavar="PATTERN", help="only tests with such names, '*sendfile*' for example")
    arguments = arguments.parse_args()
    if arguments.full:
        return full(arguments.suites, arguments.network, arguments.match)
    failed = False
    for suite in arguments.suites or SUITES:
        with tempfile.TemporaryDirectory(prefix="baton-suites-") as directory:
            directory = Path(directory)
            native = results([], suite, directory, arguments.match)
            prefix = [str(BATON), "run", "--flip", f"1..{LONGEST}", "--flip-report", str(directory / "flips"), "--"]
            moved = results(prefix, suite, directory, arguments.match)
            flips = json.loads((directory / "flips").read_text())
        wrong = differences(native, moved)
        wrong += [f"{flips[what]} {what}" for what in ("resets", "errors") if flips[what]]
        for cause, life in flips["unmoved"].items():
            limit = LONGEST_BURST if NO_TIME in cause else LONGEST
            if life > limit + SLACK and not any(known in cause for known in STAYS):
                wrong.append(f"a connection lived {life} ms and never moved ({cause or 'it never came to it'})")
        failed |= bool(wrong) or not native
        print(f"{suite:<18} {len(native):>5} tests  {flips['connections']:>4} connections  {flips['moves']:>5} moves  {'; '.join(wrong) or 'the same'}")
        print(f"{'':<18} given back {flips['given_back']}  never moved, longest ms {flips['unmoved']}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

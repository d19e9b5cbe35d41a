#!/usr/bin/env python3
"""What `baton capture` writes, read by the distribution's tshark: connections that move, and their NIC's death.

    make operate                      builds, installs Debian's tshark, then this among others
    tests/operate/capture.py BATON    a program that was built, with its library beside it

It runs in a network namespace of its own, with loopback only. tshark finds no retransmission and no lost segment before, during and after
the moves of a connection, and shows moves and a death as comments; capinfos finds the file in order, with its interfaces and counts.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from shared import PATIENCE, in_namespace, load, step, wait_until


def output(command, **settings):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, timeout=PATIENCE, check=True, **settings)
    return done.stdout.decode()


def tshark(file, filter, *fields):
    """The fields of the frames that match."""
    words = [word for field in fields for word in ("-e", field)]
    lines = output(["tshark", "-r", file, "-Y", filter, "-T", "fields", *words], stderr=subprocess.DEVNULL)
    return [line.split("\t") for line in lines.splitlines()]


def captured(baton, environment, file, *arguments):
    """Runs a capture until it has been sent SIGINT; in between what the caller does."""
    command = [baton, "capture", "-w", file, *arguments]
    capture = subprocess.Popen([str(word) for word in command], env=environment, stderr=subprocess.PIPE, text=True)
    said = capture.stderr.readline()
    assert said.startswith("capturing to"), said
    yield
    capture.send_signal(signal.SIGINT)
    _, said = capture.communicate(timeout=PATIENCE)
    assert capture.returncode == 0 and "\n0 frames dropped by the NIC" in said, said
    yield said


def listed(baton, environment):
    return json.loads(output([baton, "ls", "--json"], env=environment))


def check(baton):
    with tempfile.TemporaryDirectory(prefix="baton-operate-capture-") as folder:
        folder = Path(folder)
        environment = {name: value for name, value in os.environ.items() if name != "BATON_SOCKET"}
        script = folder / "load.py"
        script.write_text(load(1, 3000, 0.005))
        loads = [baton, "run", "--flip", "300..600", "--", sys.executable, script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**environment, "TMPDIR": str(folder)}}
        with subprocess.Popen([str(word) for word in loads], **pipes) as server:
            port = int(server.stdout.readline())
            (agent,) = folder.glob("baton-run-*/agent.sock")
            environment["BATON_SOCKET"] = str(agent)
            try:
                moves(baton, environment, folder, port)
            finally:
                server.stdin.close()
                server.wait(PATIENCE)


def moves(baton, environment, folder, port):
    file = folder / "moves.pcapng"
    capture = captured(baton, environment, file, "--kernel", "tcp", "port", str(port))
    next(capture)

    def moved():
        return sum(one["moves"] for one in listed(baton, environment))

    before = moved()
    wait_until("ten moves", lambda: moved() >= before + 10)
    next(capture)
    step("tshark: no retransmission, nothing lost")
    wrong = "tcp.analysis.retransmission or tcp.analysis.lost_segment or tcp.analysis.out_of_order"
    found = tshark(file, wrong, "frame.number", "_ws.col.Info")
    assert not found, found[:20]
    frames = {name: len(tshark(file, f"frame.interface_name == {name} and tcp.len > 0", "frame.number")) for name in ("nic", "kernel")}
    assert all(frames.values()), frames
    step(f"frames with data: {frames}")
    comments = [comment for (comment,) in tshark(file, "frame.comment", "frame.comment")]
    for words in ("moved to the NIC in", "moved to the kernel in"):
        assert any(words in comment for comment in comments), (words, comments)
    step(f"comments: {len(comments)}, as {comments[0]!r}")
    about = output(["capinfos", file])
    assert "Strict time order:   True" in about and "Number of interfaces in file: 2" in about, about
    step("only headers are there")
    assert not tshark(file, "data.data contains 78:78:78:78", "frame.number")
    step("a NIC is killed")
    file = folder / "death.pcapng"
    capture = captured(baton, environment, file, "--kernel")
    next(capture)
    wait_until("a connection is on the NIC", lambda: any(one["place"] == "nic" for one in listed(baton, environment)))
    nic = json.loads(output([baton, "nic", "show", "--json"], env=environment))["nics"][0]["process"]
    os.kill(nic, signal.SIGKILL)
    before = moved()
    wait_until("moves", lambda: moved() >= before + 4)
    said = next(capture)
    comments = [comment for (comment,) in tshark(file, "frame.comment", "frame.comment")]
    assert any("died" in text for text in [*comments, said]), (comments, said)


in_namespace(check)

#!/usr/bin/env python3
"""Nothing is left behind: descriptors of the program and of Baton's processes, shared memory, connections that the agent knows, before and
after many short connections, many idle ones, nginx's reload and binary upgrade under load, forking servers, and exec.

    tests/programs/leaks.py
    tests/programs/leaks.py --only short,reload

Each scenario runs once small, to warm up, and once large. Afterwards no more than a few additional descriptors may be held. It needs
root and nginx, and makes a network namespace of its own.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs
from programs import BATON, HERE, check, free_port, make_files, run_directory, together, tool

# More additional descriptors than this are a leak. A pool may grow by a page or a thread.
SLACK = 3


def processes():
    """Baton's processes of this namespace, by role."""
    own = os.readlink("/proc/self/ns/net")
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if len(words) > 1 and words[1].endswith(b"-process") and os.readlink(entry / "ns" / "net") == own:
                found[words[1].decode()] = entry
    return found


def held(entry):
    """Descriptors of a process, and its mappings of shared memory."""
    maps = (entry / "maps").read_text()
    return len(list((entry / "fd").iterdir())), sum("memfd:" in line for line in maps.splitlines())


class Scene(programs.Trial):
    """A program under Baton."""

    def __init__(self, directory):
        super().__init__("connections", "run", 4, directory)

    def counts(self):
        """What each process holds once the agent has forgotten every connection."""
        place = run_directory(self.processes[0].pid) / "agent.sock"

        def known():
            return json.loads(subprocess.run([BATON, "ls", "--json", "--socket", place], capture_output=True, check=True).stdout)

        self.await_that(lambda: not known(), "an empty list of connections")
        program = Path(f"/proc/{self.processes[0].pid}")
        children = (program / "task" / program.name / "children").read_text().split()
        roles = processes() | {f"program {at}": Path(f"/proc/{pid}") for at, pid in enumerate([program.name, *children])}
        return {role: held(entry) for role, entry in sorted(roles.items())}


def nginx(scene, daemon="off"):
    files, port = make_files(scene.directory / "www", (100, 5000, 70_000)), free_port()
    (scene.directory / "nginx.conf").write_text(f"""
        user root; worker_processes 1; pid {scene.directory}/nginx.pid; error_log stderr warn; daemon {daemon};
        events {{ worker_connections 4096; }}
        http {{ access_log off; sendfile on; keepalive_requests 100000; keepalive_timeout 600;
                server {{ listen 127.0.0.1:{port} backlog=4096; root {scene.directory}/www; }} }}""")
    scene.under_baton([tool("nginx"), "-e", "stderr", "-c", scene.directory / "nginx.conf"])
    scene.await_port(port)
    return files, port


def short(scene):
    files, port = nginx(scene)

    def work(count):
        def fetch(number):
            for _ in range(count // 8):
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                link.request("GET", "/f5000", headers={"Connection": "close"})
                check(link.getresponse().read() == files["f5000"], "a short answer came wrong")
                link.close()

        together(8, fetch)

    return work, 400, 10_000


def idle(scene):
    files, port = nginx(scene)

    def work(count):
        links = [http.client.HTTPConnection("127.0.0.1", port, timeout=30) for _ in range(count)]
        for link in links:
            link.request("GET", "/f100")
            check(link.getresponse().read() == files["f100"], "an answer came wrong")
        # Waits: the connections are idle meanwhile; no event ends that.
        time.sleep(1)
        for link in links:
            link.request("GET", "/f100")
            check(link.getresponse().read() == files["f100"], "an answer after a pause came wrong")
        for link in links:
            link.close()

    return work, 50, 1000


def fetching(port, files, until, counts):
    """Requests on connections that the server may close between two of them; an answer that has begun must be whole."""

    def fetch(number):
        chance, link = random.Random(number), None
        while not until():
            name = chance.choice(list(files))
            try:
                link = link or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                link.request("GET", f"/{name}")
                answer = link.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):
                counts["closed"] += 1
                link = None
                continue
            check(answer.read() == files[name], f"/{name} came wrong")
            counts["answers"] += 1

    together(6, fetch)


def disturbed(disturb):
    """nginx under load while an action is repeated on it."""

    def scenario(scene):
        files, port = nginx(scene)

        def work(count):
            ended, counts = [], {"answers": 0, "closed": 0}

            def one(number):
                if number == 0:
                    try:
                        for _ in range(count):
                            disturb(scene)
                            # Waits: between two disturbances; the same must hold at any moment.
                            time.sleep(0.3)
                    finally:
                        ended.append(True)
                else:
                    fetching(port, files, lambda: ended, counts)

            together(2, one)
            check(counts["answers"] > 20 * count, f"only {counts}")

        return work, 2, 12

    return scenario


def reload(scene):
    os.kill(int((scene.directory / "nginx.pid").read_text()), signal.SIGHUP)


def forking(scene):
    process = scene.under_baton([sys.executable, HERE / "servers.py", "fork"], stdout=subprocess.PIPE)
    port = int(process.stdout.readline())

    def work(count):
        def talk(number):
            for _ in range(count // 4):
                with socket.create_connection(("127.0.0.1", port), 30) as sock:
                    for size in (1, 1000, 30_000):
                        sock.sendall(bytes(size))
                        got = 0
                        while got < size:
                            got += len(sock.recv(65536))

        together(4, talk)

    return work, 20, 400


EXEC = """
import os, socket, sys
listener = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else socket.create_server(("127.0.0.1", 0))
if len(sys.argv) == 1:
    print(listener.getsockname()[1], flush=True)
os.set_inheritable(listener.fileno(), True)
for _ in range(10):
    sock, _ = listener.accept()
    while data := sock.recv(65536):
        sock.sendall(data)
    sock.close()
os.execv(sys.executable, [sys.executable, __file__, str(listener.fileno())])
"""


def exec_again(scene):
    program = scene.directory / "again.py"
    program.write_text(EXEC)
    process = scene.under_baton([sys.executable, program], stdout=subprocess.PIPE)
    port = int(process.stdout.readline())

    def work(count):
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", port), 30) as sock:
                sock.sendall(b"x" * 1000)
                got = 0
                while got < 1000:
                    got += len(sock.recv(65536))

    return work, 20, 200


SCENARIOS = {"short": short, "idle": idle, "reload": disturbed(reload), "forking": forking, "exec": exec_again}


def master_of(pid):
    with contextlib.suppress(OSError, ValueError):
        return int(pid.read_text())
    return None


def has_workers(master):
    """Whether nginx's master has started workers. A signal that it gets before may have no effect."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{master}/task/{master}/children").read_text())
    return False


def has_ended(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


def upgrade():
    """nginx's binary upgrade (USR2, then QUIT to the old master) under load, natively and under Baton: as many closed connections or fewer,
    and the new master serves."""
    rows = []
    for mode in ("native", "run"):
        with tempfile.TemporaryDirectory(prefix="baton-leaks-") as directory:
            os.chmod(directory, 0o755)
            scene = programs.Trial("nginx", mode, 4, Path(directory))
            try:
                # An nginx that was started in the foreground refuses to be upgraded.
                files, port = nginx(scene, "on")
                pid, ended, counts = scene.directory / "nginx.pid", [], {"answers": 0, "closed": 0}
                scene.await_that(lambda: has_workers(master_of(pid)), "the first master")
                masters = [master_of(pid)]

                def serves():
                    before = counts["answers"]
                    scene.await_that(lambda: counts["answers"] >= before + 100, "a hundred answers")

                def one(number):
                    if number == 1:
                        fetching(port, files, lambda: ended, counts)
                        return
                    try:
                        for _ in range(3):
                            os.kill(masters[-1], signal.SIGUSR2)
                            scene.await_that(lambda: master_of(pid) != masters[-1] and has_workers(master_of(pid)), "the new master")
                            masters.append(master_of(pid))
                            serves()
                            os.kill(masters[-2], signal.SIGQUIT)
                            scene.await_that(lambda: has_ended(masters[-2]), "the end of the old master")
                            serves()
                    finally:
                        ended.append(True)

                try:
                    together(2, one)
                finally:
                    for master in masters:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(master, signal.SIGTERM)
                rows.append(counts)
            finally:
                scene.end()
    native, run = rows
    check(min(native["answers"], run["answers"]) > 100, f"hardly an answer: {rows}")
    check(run["closed"] <= 2 * native["closed"] + 20, f"more connections were closed than natively: {rows}")
    return f"answers, and connections closed between two requests: native {native}, under Baton {run}"


def leaks(name):
    with tempfile.TemporaryDirectory(prefix="baton-leaks-") as directory:
        os.chmod(directory, 0o755)
        scene = Scene(Path(directory))
        try:
            work, little, much = SCENARIOS[name](scene)
            work(little)
            before = scene.counts()
            work(much)
            after = scene.counts()
        finally:
            scene.end()
        rows = {role: (before[role], after[role]) for role in before if role in after}
        check(rows and any(role.endswith("process") for role in rows), f"no process to compare: {before} {after}")
        grown = [role for role, (one, other) in rows.items() if other[0] > one[0] + SLACK or other[1] > one[1] + SLACK]
        check(not grown, f"{', '.join(grown)}: {rows}")
        return ", ".join(f"{role.removesuffix('-process')} {one[0]}→{other[0]}" for role, (one, other) in rows.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SCENARIOS, "upgrade"]
    parser.add_argument("--only", help="scenarios, separated by commas", type=lambda text: text.split(","), default=names)
    given = parser.parse_args()
    if unknown := [name for name in given.only if name not in names]:
        parser.error(f"{', '.join(unknown)}: there is no such scenario; there are {', '.join(names)}")
    programs.isolate(__file__)
    failed = False
    for name in given.only:
        try:
            print(f"{name:<10} ok  {upgrade() if name == 'upgrade' else leaks(name)}", flush=True)
        except Exception as failure:  # noqa: BLE001 - the list has it
            failed = True
            print(f"{name:<10} FAILED  {type(failure).__name__}: {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

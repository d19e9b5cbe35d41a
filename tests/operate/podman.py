#!/usr/bin/env python3
"""Containers of the image that packaging/image makes, run by podman with its usual seccomp profile and capabilities: nginx in each uses the
Baton of the host, which is `baton up` in a network namespace with loopback only.

    make operate
    tests/operate/podman.py DEB BATON      the package, and the command that runs on the host

A container has a network of its own; in one also its users are others than the host's. Each either has its connection on the NIC, or says
in one line why not. The image and podman's files are in target/operate/podman; nothing of podman's usual storage is touched.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shared import INSIDE, PATIENCE, running, step, wait_until
from web import Client

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "target/operate/podman"
ARCHIVE, IMAGE = "nginx.tar", "localhost/baton-nginx"
SERVER = ["nginx", "-g", "daemon off;"]
EAGER = ["--rule", "accepted", "--eager"]
# podman's settings: its own locks, and no service of the machine's.
CONFIGURATION = """
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
[containers]
log_driver = "k8s-file"
"""
# Users of a container of its own.
OTHERS = ["--uidmap=0:200000:65536", "--gidmap=0:200000:65536"]


class Podman:
    """podman with storage of its own. Containers get no control group of their own: that depends on the machine."""

    def __init__(self, folder):
        self.folder, self.number = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(CONFIGURATION)
        self.environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        places = [f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
        self.command = ["podman", *places, "--storage-driver=vfs"]

    def run(self, *words, check=True):
        """Runs podman. Returns its status and what it said."""
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": PATIENCE}
        done = subprocess.run([*self.command, *words], env=self.environment, **settings)
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}"
        return done.returncode, done.stdout.strip()

    def once(self, *words):
        """Runs a command in a container of its own until it ends."""
        return self.run("run", "--rm", "--network=none", "--cgroups=disabled", *words, check=False)

    @contextlib.contextmanager
    def container(self, *words):
        """A container that runs meanwhile: its name, and the number of its first process."""
        self.number += 1
        name = f"baton-{os.getpid()}-{self.number}"
        self.run("run", "--detach", f"--name={name}", "--network=none", "--cgroups=disabled", *words)
        try:
            yield name, int(self.run("inspect", "--format", "{{.State.Pid}}", name)[1])
        except BaseException:
            print(self.run("logs", name, check=False)[1], file=sys.stderr)
            raise
        finally:
            self.run("rm", "--force", "--time=5", name, check=False)

    def end(self):
        self.run("rm", "--all", "--force", check=False)
        self.run("rmi", "--all", "--force", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Network:
    """That of a container, by the number of its first process."""

    def __init__(self, process):
        self.process = process
        subprocess.run(self.in_network("ip", "link", "set", "lo", "up"), check=True)

    def in_network(self, *command):
        """The command that runs a program of this machine there."""
        return ["nsenter", f"--target={self.process}", "--net", *command]

    def answers(self):
        """Whether somebody listens at port 80."""
        return subprocess.run(self.in_network(sys.executable, "-c", LISTENS)).returncode == 0


LISTENS = "import socket, sys; sys.exit(socket.socket().connect_ex(('127.0.0.1', 80)))"


def listed(baton, door, port):
    """What the agents of all namespaces say about the connection with this peer's port: where it is, and why."""
    found = []
    for socket in door.glob("agent.sock.*"):
        done = subprocess.run([baton, "ls", "--json", "--socket", socket], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            found += [one for one in json.loads(done.stdout) if one["peer"].endswith(f":{port}")]
    return found


def served(podman, baton, door, name, options):
    step(f"nginx in a container, {name}")
    mount = f"--volume={door}:/run/baton"
    with podman.container(*options, mount, IMAGE, "baton", "run", *EAGER, "--", *SERVER) as (container, process):
        network = Network(process)
        wait_until("nginx listens", network.answers)
        client = Client(network)
        port = client.ask()

        def settled():
            client.ask(1)
            on_nic = any(one["place"] == "nic" for one in listed(baton, door, port))
            said = [line for line in podman.run("logs", container)[1].splitlines() if line.startswith("baton: ")]
            return "its connection is on the NIC" if on_nic else " / ".join(said)

        outcome = wait_until("its connection is on the NIC, or it says why not", settled)
        print(f"  {outcome}")
        assert "\n" not in outcome and " / " not in outcome, "more than one line"
        status = Path(f"/proc/{process}/status").read_text()
        assert "Seccomp:\t2" in status, "it has no filter of system calls"
        client.end()
        return outcome


def refused(podman):
    step("containers in which no Baton can be")
    for options, command, texts in [
        ([], ["baton", "run", "--", "true"], ["no right to load BPF programs", "-v /run/baton:/run/baton"]),
        ([], ["baton", "run", "--if-up", "--", "echo", "started"], ["runs without Baton: none is up", "started"]),
        (["--cap-add=all"], ["baton", "run", "--", "true"], ["there is no /dev/net/tun", "--device /dev/net/tun"]),
        ([], ["baton", "doctor"], ["MISSING", "run as root"]),
    ]:
        _, said = podman.once(*options, IMAGE, *command)
        missing = [text for text in texts if text not in said]
        assert not missing, f"{options} {command}: without {missing}:\n{said}"
        print(f"  {' '.join([*options, *command])}: {said.splitlines()[0][:150]}")


def make_image(package):
    step("the image, from the distribution's packages")
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run([ROOT / "packaging/image", package, FOLDER / ARCHIVE, "nginx-light"], check=True, stdout=subprocess.DEVNULL)


def check(baton):
    with tempfile.TemporaryDirectory(prefix="run-", dir=FOLDER) as door:
        door = Path(door)
        # Programs of all users look for the socket in it.
        door.chmod(0o755)
        podman = Podman(FOLDER / "storage")
        try:
            podman.run("import", FOLDER / ARCHIVE, IMAGE)
            with running([baton, "up", "--socket", door / "agent.sock"]):
                wait_until("a Baton is up", lambda: (door / "agent.sock").exists())
                assert "on the NIC" in served(podman, baton, door, "with podman's usual profile", [])
                assert "on the NIC" in served(podman, baton, door, "with users of its own", OTHERS)
            refused(podman)
        finally:
            podman.end()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if os.environ.get(INSIDE) is None:
        missing = [tool for tool in ("podman", "crun", "mmdebstrap", "nsenter") if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            assert "CI" not in os.environ, "nothing is skipped in CI"
            print(f"skipped: it needs root{', and ' + ', '.join(missing) if missing else ''}")
            return
        # Packages are fetched, which the namespace has no way for.
        make_image(sys.argv[1])
        command = ["unshare", "--net", "sh", "-ec", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        status = subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode
        (FOLDER / ARCHIVE).unlink()
        sys.exit(status)
    check(Path(sys.argv[2]).resolve())
    print("all of it holds")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Installs the Debian package into a system of its own with systemd, runs nginx under it, and removes it again.

    make operate                      builds the package (PROFILE=release by default), then this
    tests/operate/package.py DEB

Each step prints a line. What cannot run on this machine is skipped, with the reason; a step that fails ends the test with status 1.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from container import PATIENCE, Container

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "target/operate"
COMMANDS = ["up", "run", "status", "enable", "disable", "ls", "move", "nic", "nic-set", "doctor", "attach", "mpi"]

# A client of this machine's Python in the container's network: a line with a number makes so many requests on one connection.
CLIENT = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", 80), 60)
stream = peer.makefile("rb")
for line in sys.stdin:
    for _ in range(int(line)):
        peer.sendall(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
        status = stream.readline()
        assert b" 200 " in status, status
        length = None
        while (header := stream.readline()) != b"\\r\\n":
            assert header, "the connection has ended"
            name, value = header.split(b":", 1)
            if name.lower() == b"content-length":
                length = int(value)
        body = stream.read(length)
        assert len(body) == length and b"nginx" in body
    print(peer.getsockname()[1], flush=True)
"""

# The same of redis.
REDIS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", 6379), 60)
stream = peer.makefile("rb")
for line in sys.stdin:
    for number in range(int(line)):
        peer.sendall(b"PING %d\\r\\n" % number)
        assert stream.readline() == b"$%d\\r\\n" % len(str(number))
        assert stream.readline() == b"%d\\r\\n" % number
    print(peer.getsockname()[1], flush=True)
"""


def step(text):
    print(f"▸ {text}", flush=True)


def wait_until(what, holds):
    """Waits for what no event tells of."""
    until = time.monotonic() + PATIENCE
    while not (got := holds()):
        assert time.monotonic() < until, f"{what}: not within {PATIENCE} s"
        time.sleep(0.1)  # Waits: the tools of the container offer no event for it; the bound is minutes.
    return got


class Client:
    def __init__(self, container, script=None):
        command = container.in_network(sys.executable, "-c", script or CLIENT)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, requests=20):
        """Makes requests, and returns the connection's local port."""
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the client's connection broke"
        return int(line)

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(PATIENCE) == 0


def connections(container, port):
    """The places of the server's connection with this peer's port."""
    listed = json.loads(container.says("baton", "ls", "--json"))
    return [one["place"] for one in listed if one["peer"].endswith(f":{port}")]


class Bpf:
    """The BPF objects that processes hold: while they live by their /proc entries, afterwards by their numbers."""

    CALL = {"x86_64": 321, "aarch64": 280}
    BY_ID = {"prog_id": 13, "map_id": 14, "link_id": 30}

    def __init__(self, processes):
        self.found = set()
        for process in processes:
            for entry in Path(f"/proc/{process}/fdinfo").glob("*"):
                try:
                    self.found.update(re.findall(r"^(prog_id|map_id|link_id):\s+(\d+)$", entry.read_text(), re.MULTILINE))
                except OSError:
                    pass  # It was closed meanwhile.

    def left(self):
        call = self.CALL.get(os.uname().machine)
        if call is None:
            return set()
        library = ctypes.CDLL(None, use_errno=True)
        left = set()
        for kind, number in self.found:
            attributes = (ctypes.c_uint32 * 16)(int(number))
            descriptor = library.syscall(call, self.BY_ID[kind], ctypes.byref(attributes), ctypes.sizeof(attributes))
            if descriptor >= 0:
                os.close(descriptor)
                left.add((kind, number))
        return left


def processes(container):
    """The processes of the service, by their numbers on this machine."""
    found = []
    ours = os.readlink(f"/proc/{container.leader}/ns/pid")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns/pid") == ours and (entry / "comm").read_text().startswith("baton"):
                found.append(int(entry.name))
        except OSError:
            pass  # It has ended.
    return found


def install(container, package):
    step("installs the package")
    shutil.copy(package, container.root / "baton.deb")
    print(container.says("apt-get", "install", "-qy", "/baton.deb").splitlines()[-1])
    (container.root / "baton.deb").unlink()
    assert container.says("dpkg", "-V", "baton") == ""
    listed = container.says("dpkg", "-L", "baton").split()
    missing = [path for path in listed if not os.path.lexists(str(container.root) + path)]
    assert not missing, missing
    print(f"  {len(listed)} files and directories")


def papers(container, package):
    if shutil.which("lintian"):
        step("lintian")
        subprocess.run(["lintian", "--no-cfg", "--fail-on=error,warning", "--allow-root", package], check=True)
    step("manual pages, completions, the library for C")
    for command in COMMANDS:
        container.says("man", "-w", f"baton-{command}")
    container.says("man", "-w", "baton")
    script = """. /usr/share/bash-completion/bash_completion; . /usr/share/bash-completion/completions/baton; complete -p baton >/dev/null
        COMP_WORDS=(baton st); COMP_CWORD=1; _baton baton st baton; echo "${COMPREPLY[@]}" """
    assert container.says("bash", "-c", script).split() == ["status"]
    assert "libbaton.so.0" in container.says("ldconfig", "-p")
    for library in ("libbaton_preload.so", "librmpp-fi.so", "librmpp-memory.so"):
        assert (container.root / "usr/lib/baton" / library).exists()


def service(container):
    step("the service")
    print(container.says("baton", "status", "--wait", "60").splitlines()[0])
    assert container.says("systemctl", "is-enabled", "baton") == "enabled"
    verified = container.says("systemd-analyze", "verify", "baton.service")
    assert "baton" not in verified, verified
    print("  " + container.says("systemd-analyze", "security", "--no-pager", "baton.service").splitlines()[-1])
    status, text = container.run("baton", "doctor", check=False)
    print(f"  baton doctor: {status}" + "".join(f"\n    {line}" for line in text.splitlines() if not line.startswith("ok")))
    state = json.loads(container.says("baton", "status", "--json"))
    assert state["state"] == "up" and len(state["agents"][0]["nics"]) == 1, state


def rights(container):
    step("what the unit takes away is not missed")
    # The same unit with another command: all of its restrictions.
    unit = (container.root / "usr/lib/systemd/system/baton.service").read_text()
    unit = unit.replace("Type=notify", "Type=oneshot").replace("ExecStart=/usr/bin/baton up", "ExecStart=/usr/bin/baton doctor")
    unit = re.sub(r"^(?:Restart|RestartSec|ExecStopPost|RuntimeDirectory\w*)=.*\n", "", unit, flags=re.MULTILINE)
    path = container.root / "etc/systemd/system/doctor.service"
    path.write_text(unit)
    container.says("systemctl", "daemon-reload")
    status, _ = container.run("systemctl", "start", "doctor", check=False)
    log = container.says("journalctl", "-u", "doctor", "--no-pager", "-o", "cat")
    assert status == 0 and "MISSING" not in log and "A NIC without rights" not in log, log
    path.unlink()
    container.says("systemctl", "daemon-reload")

    state = json.loads(container.says("baton", "status", "--json"))
    nic = dict(
        line.split(":\t", 1)
        for line in container.says("cat", f"/proc/{state['agents'][0]['nics'][0]['process']}/status").splitlines()
        if ":\t" in line
    )
    assert nic["Uid"].split()[0] != "0" and int(nic["CapBnd"], 16) == 0 and int(nic["CapEff"], 16) == 0, nic
    assert nic["NoNewPrivs"] == "1" and nic["Seccomp"] == "2", nic
    niceness = container.says("ps", "-o", "ni=", "-p", str(state["agents"][0]["process"]))
    print(f"  the agent runs at nice {niceness}, the NIC as user {nic['Uid'].split()[0]}")

    # A program of another network namespace, which a container's is, and one of an ordinary user.
    script = "ip link set lo up && baton run -- baton status --json"
    state = json.loads(container.says("unshare", "--net", "sh", "-c", script))
    assert len(state["agents"]) == 2, state
    for command in (["status"], ["ls", "--socket", "/run/baton/agent.sock"]):
        container.says("runuser", "-u", "www-data", "--", "baton", *command)


def logs(container):
    step("the journal has levels and fields, and a warning says what to do")
    nic = json.loads(container.says("baton", "status", "--json"))["agents"][0]["nics"][0]["process"]
    container.says("kill", "-KILL", str(nic))
    matching = ["journalctl", "-u", "baton", "NIC=0", "PRIORITY=4", "--no-pager", "-o", "cat"]
    wait_until("the NIC's death is found by its field", lambda: f"process {nic}) has died" in container.run(*matching, check=False)[1])
    log = container.says(*matching)
    assert "`baton report` writes" in log, log
    started = container.says("journalctl", "-u", "baton", "PRIORITY=6", "--no-pager", "-o", "cat")
    assert "up: it is up at /run/baton/agent.sock" in started, started


def configuration(container):
    step("a wrong configuration file is refused, and named")
    path = container.root / "etc/baton/config.toml"
    before = path.read_text()
    path.write_text(before + "\nspins = 10\n")
    status, _ = container.run("systemctl", "restart", "baton", check=False)
    assert status != 0
    lines = before.count("\n") + 2
    log = container.says("journalctl", "-u", "baton", "--no-pager", "-o", "cat")
    assert f"/etc/baton/config.toml:{lines}: there is no key \"spins\"" in log, log
    container.run("systemctl", "stop", "baton", check=False)
    assert container.run("baton", "status", check=False)[0] == 3
    path.write_text(before + "\nspin = 20\nnics = 2\n")
    container.run("systemctl", "reset-failed", "baton", check=False)
    container.says("systemctl", "start", "baton")
    assert len(json.loads(container.says("baton", "status", "--json"))["agents"][0]["nics"]) == 2
    path.write_text(before)
    container.says("systemctl", "restart", "baton")


def serve(container, package):
    step("nginx runs under a drop-in of `baton enable`, and its connection goes to the NIC")
    assert "baton run --if-up" in container.says("baton", "enable", "--dry-run", "nginx")
    print("  " + container.says("baton", "enable", "nginx", "--restart", "--", "--rule", "accepted", "--eager").replace("\n", "\n  "))
    client = Client(container)
    port = client.ask()
    wait_until("the connection is on the NIC", lambda: client.ask() and connections(container, port) == ["nic"])
    state = container.says("baton", "status")
    assert "1 connections on NICs" in state, state
    print("  " + state.replace("\n", "\n  "))

    step("redis as well: a unit of Type=notify, of an ordinary user, with restrictions of its own")
    container.says("baton", "enable", "redis-server", "--restart", "--", "--rule", "accepted", "--eager")
    assert container.says("systemctl", "show", "-p", "User", "--value", "redis-server") == "redis"
    redis = Client(container, REDIS)
    at_redis = redis.ask()
    wait_until("redis' connection is on the NIC", lambda: redis.ask() and connections(container, at_redis) == ["nic"])
    redis.end()
    container.says("baton", "disable", "redis-server")
    container.says("systemctl", "stop", "redis-server")

    step("`baton up` is killed: the connection goes on, and the next Baton has it")
    before = container.says("systemctl", "show", "-p", "MainPID", "--value", "baton")
    container.says("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "baton")
    client.ask(200)
    wait_until(
        "another one is up",
        lambda: container.says("systemctl", "show", "-p", "MainPID", "--value", "baton") not in (before, "0")
        and container.run("baton", "status", check=False)[0] == 0,
    )
    client.ask(200)

    step("an upgrade: the connection goes on, and the new Baton has the program's next one")
    shutil.copy(package, container.root / "baton.deb")
    container.says("apt-get", "install", "--reinstall", "-qy", "/baton.deb")
    (container.root / "baton.deb").unlink()
    container.says("baton", "status", "--wait", "60")
    client.ask(200)

    step("the service is stopped under a connection on the NIC: the connection goes on")
    fresh = Client(container)
    port = fresh.ask()
    wait_until("a connection is on the NIC", lambda: fresh.ask() and connections(container, port) == ["nic"])
    bpf = Bpf(processes(container))
    assert bpf.found, "no BPF object was found"
    began = time.monotonic()
    container.says("systemctl", "stop", "baton")
    print(f"  stopped in {time.monotonic() - began:.1f} s; {len(bpf.found)} BPF objects were held")
    for one in (client, fresh):
        one.ask(200)
        one.end()
    assert container.run("baton", "status", check=False)[0] == 3
    assert container.says("systemctl", "show", "-p", "Result", "--value", "baton") == "success"
    assert not processes(container)
    wait_until("all BPF objects are gone", lambda: not bpf.left())
    links = container.says("ip", "-br", "link").splitlines()
    assert [line.split()[0] for line in links if line.split()[0].startswith("baton")] == []

    step("without a Baton that is up, nginx starts without one")
    # Otherwise the drop-in's Wants= starts one.
    container.says("systemctl", "mask", "--runtime", "baton")
    container.says("systemctl", "restart", "nginx")
    alone = Client(container)
    alone.ask()
    alone.end()
    container.says("systemctl", "unmask", "--runtime", "baton")
    assert "runs without Baton: none is up" in container.says("journalctl", "-u", "nginx", "--no-pager", "-o", "cat")
    container.says("systemctl", "start", "baton")


def refusals(container):
    step("units that cannot be run so are refused")
    units = container.root / "etc/systemd/system"
    for name, text, reason in [
        ("jail", "RootDirectory=/srv\nExecStart=/bin/sleep 1", "RootDirectory"),
        ("nothing", "Type=oneshot\nExecStop=/bin/true", "no ExecStart="),
        ("early", "ExecStart=/bin/sleep 1\n[Unit]\nDefaultDependencies=no", "before a Baton"),
        ("shy", "RestrictAddressFamilies=AF_INET\nExecStart=/bin/sleep 1", "AF_UNIX"),
    ]:
        (units / f"{name}.service").write_text(f"[Service]\n{text}\n")
        container.says("systemctl", "daemon-reload")
        status, output = container.run("baton", "enable", name, check=False)
        assert status == 2 and reason in output, output
        (units / f"{name}.service").unlink()
    container.says("systemctl", "daemon-reload")
    status, output = container.run("baton", "enable", "baton", check=False)
    assert status == 2 and "Baton itself" in output, output
    assert "enable systemd-hostnamed.service" in container.says("baton", "enable", "--dry-run", "dbus-org.freedesktop.hostname1")
    (units / "many@.service").write_text("[Service]\nExecStart=-@/bin/sleep sleep-%i \\\n  1000\n")
    container.says("systemctl", "daemon-reload")
    for name in ("many@", "many@one"):
        output = container.says("baton", "enable", "--dry-run", name)
        assert "ExecStart=-/usr/bin/baton run --if-up --argv0 sleep-%i -- /bin/sleep 1000" in output, output
    container.says("baton", "enable", "many@")
    container.says("systemctl", "start", "many@two")
    # It is started when `baton run` is, which becomes it a moment later.
    wait_until("the program has its name", lambda: "sleep-two 1000" in container.says("ps", "-e", "-o", "args="))
    container.says("systemctl", "stop", "many@two")
    assert "many@.service.d" in container.says("baton", "disable", "many@")
    (units / "many@.service").unlink()
    container.says("systemctl", "daemon-reload")
    status, output = container.run("baton", "enable", "there-is-none", check=False)
    assert status == 2 and "there-is-none.service" in output, output


def purge(container, before):
    step("is purged: nothing is left")
    print("  " + "\n  ".join(container.says("apt-get", "purge", "-qy", "baton").splitlines()[-3:]))
    assert not processes(container)
    assert not (container.root / "etc/systemd/system/nginx.service.d").exists()
    assert container.run("ls", "/run/baton", check=False)[0] != 0, container.run("ls", "-la", "/run/baton")[1]
    container.says("systemctl", "restart", "nginx")
    client = Client(container)
    client.ask()
    client.end()
    left = sorted(container.files() - before)
    gone = sorted(before - container.files())
    assert not left and not gone, (left, gone)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if os.geteuid() != 0:
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print("skipped: it needs root, to make a container")
        return
    missing = [tool for tool in ("mmdebstrap", "systemd-nspawn", "nsenter") if shutil.which(tool) is None]
    if missing or not Path("/dev/net/tun").exists():
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print(f"skipped: this machine lacks {', '.join(missing) or '/dev/net/tun'}")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    container = Container(FOLDER)
    try:
        step("boots a Debian system")
        container.boot()
        # The manual's index is made once, by whoever comes first.
        container.run("mandb", "-q", check=False)
        before = container.files()
        install(container, sys.argv[1])
        papers(container, sys.argv[1])
        service(container)
        rights(container)
        logs(container)
        configuration(container)
        serve(container, sys.argv[1])
        refusals(container)
        purge(container, before)
    except BaseException:
        if container.leader:
            for command in (["journalctl", "-u", "baton", "-u", "nginx", "--no-pager", "-n", "40"], ["baton", "ls"], ["baton", "status"]):
                print(container.run(*command, check=False)[1], file=sys.stderr)
        raise
    finally:
        container.end()
    print("all of it holds")


if __name__ == "__main__":
    main()

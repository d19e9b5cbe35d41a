#!/usr/bin/env python3
"""Installs the Debian package into a system with systemd, runs nginx under it, upgrades it under load, and removes it again.

    make operate                      builds the package (PROFILE=release by default), then this in a container
    tests/operate/package.py DEB
    tests/operate/package.py --here DEB                 on the system that this runs on, a guest (tests/operate/guest.py); no times
    tests/operate/package.py --here --old-kernel DEB    the same where the kernel is too old for the service

Each step prints a line. What cannot run on this machine is skipped, with the reason; a step that fails ends the test with status 1.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import refusals
from container import PATIENCE, Container, Here, step, wait_until
from left import Bpf, State, processes
from web import REDIS, Client, Load, on_nic

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "target/operate"
COMMANDS = ["up", "run", "status", "enable", "disable", "ls", "move", "nic", "nic-set", "doctor", "attach", "mpi"]
# Connections of the load under which processes are killed and the package is upgraded; and on an emulated machine.
CONNECTIONS, FEW = 48, 8
# Seconds after which connections are on the NIC again, at most, in an upgrade.
UPGRADE = 2
# A copy of the command that looks while the package's is replaced.
LOOK = "/var/tmp/baton-look"


@contextlib.contextmanager
def inside(container, package):
    """The path in the system of a copy of the package."""
    copy = container.root / "var/tmp/baton.deb"
    shutil.copy(package, copy)
    try:
        yield "/var/tmp/baton.deb"
    finally:
        copy.unlink()


def upgraded(package, folder):
    """The same package as the next version."""
    raw, made = Path(folder) / "raw", Path(folder) / "next.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", package, raw], check=True)
    control = raw / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", r"\g<0>+next", control.read_text(), flags=re.MULTILINE))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", raw, made], check=True, stdout=subprocess.DEVNULL)
    return made


def running(container):
    """The numbers of the service's processes inside, by what they are; None while it does not answer."""
    status, said = container.run("baton", "status", "--json", check=False)
    if status != 0:
        return None
    agent = json.loads(said)["agents"][0]
    keeper = container.run("ps", "-o", "ppid=", "-p", str(agent["process"]), check=False)[1].strip()
    up = container.says("systemctl", "show", "-p", "MainPID", "--value", "baton")
    return {"baton up": up, "keeper": keeper, "agent": str(agent["process"]), "NIC": str(agent["nics"][0]["process"])}


def install(container, package):
    step("installs the package")
    with inside(container, package) as path:
        print(container.says("apt-get", "install", "-qy", path).splitlines()[-1])
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
        COMP_WORDS=(baton en); COMP_CWORD=1; _baton baton en baton; echo "${COMPREPLY[@]}" """
    assert container.says("bash", "-c", script).split() == ["enable"]
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
    assert "judge a connect(2) stay in the kernel" not in log, log
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


def serve(container):
    step("nginx runs under a drop-in of `baton enable`, and its connection goes to the NIC")
    assert "baton run --if-up" in container.says("baton", "enable", "--dry-run", "nginx")
    print("  " + container.says("baton", "enable", "nginx", "--restart", "--", "--rule", "accepted", "--eager").replace("\n", "\n  "))
    client = Client(container)
    port = client.ask()
    wait_until("the connection is on the NIC", lambda: client.ask() and port in on_nic(container))
    state = container.says("baton", "status")
    assert "1 connections on NICs" in state, state
    print("  " + state.replace("\n", "\n  "))
    looks(container)
    client.end()

    step("redis as well: a unit of Type=notify, of an ordinary user, with restrictions of its own")
    container.says("baton", "enable", "redis-server", "--restart", "--", "--rule", "accepted", "--eager")
    assert container.says("systemctl", "show", "-p", "User", "--value", "redis-server") == "redis"
    redis = Client(container, REDIS)
    at_redis = redis.ask()
    wait_until("redis' connection is on the NIC", lambda: redis.ask() and at_redis in on_nic(container))
    redis.end()
    container.says("baton", "disable", "redis-server")
    container.says("systemctl", "stop", "redis-server")


def on_terminal(command, text):
    """Runs a command on a terminal of 80x24 until it shows a text; then the key q has to end it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    shown = b""
    while text not in shown:
        assert select.select([ours], [], [], PATIENCE)[0], f"it does not show {text}: {shown}"
        shown += os.read(ours, 65536)
    os.write(ours, b"q")
    with contextlib.suppress(OSError):  # There is no other end any more.
        while os.read(ours, 65536):
            pass
    os.close(ours)
    assert process.wait(PATIENCE) == 0


def looks(container):
    step("`ls`, `top`, `metrics` and the page show it")
    assert "nginx/" in container.says("baton", "ls", "-p")
    on_terminal(container.enter("baton", "top"), b"nginx")
    shown = container.says("baton", "metrics", "--once")
    assert re.search(r'^baton_program_connections\{[^}]*program="nginx"', shown, re.MULTILINE), shown
    container.says("systemd-run", "--quiet", "--collect", "--unit=page", "--", "baton", "page", "--listen", "127.0.0.1:9465")
    fetch = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9465/state', timeout=60).read().decode())"
    command = container.in_network(sys.executable, "-c", fetch)

    def fetched():
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return done.stdout if "nginx" in done.stdout else None

    wait_until("the page shows it", fetched)
    container.says("systemctl", "stop", "page")


def deaths(container, load):
    for what in ("NIC", "agent", "keeper", "baton up"):
        step(f"{what} is killed under load")
        load.await_nic("before")
        before = running(container)
        load.mark()
        container.says("kill", "-KILL", before[what])
        wait_until("another one runs", lambda what=what, before=before: (now := running(container)) and now[what] != before[what])
        load.await_nic(f"{what} was killed")
        load.expect_no_failure()

    step("all processes of the service are killed at once: what was on the NIC is reset, and all else goes on")
    before = running(container)
    load.mark()
    container.says("systemctl", "kill", "--signal=KILL", "baton")
    wait_until("others run", lambda: (now := running(container)) and now["agent"] != before["agent"])
    load.await_nic("all were killed")
    counts = load.mark()
    assert len(counts["failed"]) <= load.connections, counts
    print(f"  {len(counts['failed'])} of {load.connections} connections were reset")
    wait_until("requests", lambda: load.says("look")["requests"] > 10 * load.connections)
    load.expect_no_failure()


def upgrade(container, load, package):
    step("an upgrade under load: the service is restarted in order")
    version = container.says("dpkg-query", "-W", "-f", "${Version}", "baton")
    shutil.copy(container.root / "usr/bin/baton", str(container.root) + LOOK)
    load.await_nic("before the upgrade")
    before = running(container)
    load.mark()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        with inside(container, upgraded(package, folder)) as path:
            apt = container.enter("apt-get", "install", "-qy", path)
            process = subprocess.Popen(apt, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            seconds = load.away(process, LOOK)
        log.seek(0)
        assert process.returncode == 0, log.read().decode()
    assert container.says("dpkg-query", "-W", "-f", "${Version}", "baton") == version + "+next"
    now = running(container)
    assert all(now[what] != before[what] for what in now), (before, now)
    print(f"  connections were on the NIC again after {seconds:.2f} s at most")
    # Waits: the promise is two seconds, from the last look at which all are there to the end of the next one.
    assert not container.timed or seconds <= UPGRADE, f"{seconds} s"
    load.expect_no_failure()

    step("processes are killed while the package's files are replaced, but the service is not restarted yet")
    with inside(container, package) as path:
        container.says("dpkg", "--unpack", path)
        for what in ("NIC", "agent"):
            before = running(container)
            container.says("kill", "-KILL", before[what])
            wait_until("another one runs", lambda what=what, before=before: (now := running(container)) and now[what] != before[what])
            load.await_nic(f"{what} was killed")
        container.says("dpkg", "--configure", "--pending")
    load.await_nic("the package is configured")
    load.expect_no_failure()
    assert container.says("dpkg-query", "-W", "-f", "${Version}", "baton") == version
    os.unlink(str(container.root) + LOOK)


def under_load(container, package):
    load = Load(container, CONNECTIONS if container.timed else FEW)
    deaths(container, load)
    upgrade(container, load, package)
    load.end()


def stopped(container):
    step("the service is stopped under a connection on the NIC: the connection goes on")
    client = Client(container)
    port = client.ask()
    wait_until("a connection is on the NIC", lambda: client.ask() and port in on_nic(container))
    bpf = Bpf(processes(container))
    assert bpf.found, "no BPF object was found"
    began = time.monotonic()
    container.says("systemctl", "stop", "baton")
    print(f"  stopped in {time.monotonic() - began:.1f} s; {len(bpf.found)} BPF objects were held")
    client.ask(200)
    client.end()
    assert container.run("baton", "status", check=False)[0] == 3
    assert container.says("systemctl", "show", "-p", "Result", "--value", "baton") == "success"
    assert not processes(container)
    wait_until("all BPF objects are gone", lambda: not bpf.left())
    links = container.says("ip", "-br", "link").splitlines()
    assert [line.split()[0] for line in links if line.split()[0].startswith("baton")] == []
    natively(container)
    container.says("systemctl", "start", "baton")


def natively(container):
    step("without a Baton that is up, nginx starts without one")
    # Otherwise the drop-in's Wants= starts one.
    container.says("systemctl", "mask", "--runtime", "baton")
    container.says("systemctl", "restart", "nginx")
    alone = Client(container)
    alone.ask()
    alone.end()
    container.says("systemctl", "unmask", "--runtime", "baton")
    assert "runs without Baton: none is up" in container.says("journalctl", "-u", "nginx", "--no-pager", "-o", "cat")


def on_old_kernel(container):
    step("the service does not start on this kernel, and doctor names one to install")
    assert container.run("systemctl", "is-active", "--quiet", "baton", check=False)[0] != 0
    assert container.run("systemctl", "start", "baton", check=False)[0] != 0
    print("  " + container.says("journalctl", "-u", "baton", "--no-pager", "-o", "cat", "-g", "^baton: ").splitlines()[-1])
    status, said = container.run("baton", "doctor", check=False)
    assert status == 1 and "MISSING  Linux 6.6 or later" in said and "apt install linux-image-6.12" in said, said
    print("  " + "\n  ".join(line for line in said.splitlines() if not line.startswith("ok")))
    container.says("baton", "enable", "nginx")
    natively(container)


def refused(container):
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
    # As if benches had run.
    container.says("sh", "-c", "test ! -d /run/baton || echo > /run/baton/bench.html")
    print("  " + "\n  ".join(container.says("apt-get", "purge", "-qy", "baton").splitlines()[-3:]))
    assert not (container.root / "etc/systemd/system/nginx.service.d").exists()
    assert container.run("ls", "/run/baton", check=False)[0] != 0, container.run("ls", "-la", "/run/baton")[1]
    container.says("systemctl", "restart", "nginx")
    client = Client(container)
    client.ask()
    client.end()
    print("  " + before.expect_nothing_left())


def prepare(container):
    """What the system has before the package is installed."""
    # The manual's index is made once, by whoever comes first.
    container.run("mandb", "-q", check=False)
    (container.root / "etc/nginx/conf.d/requests.conf").write_text("keepalive_requests 1000000000;\n")
    container.says("systemctl", "restart", "nginx")
    return State(container)


def run(container, given):
    before = prepare(container)
    install(container, given.package)
    if given.old_kernel:
        on_old_kernel(container)
    else:
        papers(container, given.package)
        service(container)
        rights(container)
        logs(container)
        configuration(container)
        serve(container)
        under_load(container, given.package)
        stopped(container)
        refused(container)
        refusals.activated(container)
        refusals.meet(container)
    purge(container, before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="the system that this runs on: it has to be a guest of guest.py's")
    parser.add_argument("--old-kernel", action="store_true", help="the kernel is too old for the service")
    parser.add_argument("package")
    given = parser.parse_args()
    if given.here and not Path("/guest/baton.deb").exists():
        sys.exit("--here installs and removes packages: it is for a guest that was made for it (tests/operate/guest.py)")
    if os.geteuid() != 0:
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print("skipped: it needs root, to make a container")
        return
    tools = () if given.here else ("mmdebstrap", "systemd-nspawn", "nsenter")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing or not Path("/dev/net/tun").exists():
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print(f"skipped: this machine lacks {', '.join(missing) or '/dev/net/tun'}")
        return
    if given.here:
        container = Here()
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        container = Container(FOLDER)
    try:
        if not given.here:
            step("boots a Debian system")
            container.boot()
        run(container, given)
    except BaseException:
        if container.leader:
            for command in (["journalctl", "-u", "baton", "-u", "nginx", "-u", "activated", "--no-pager", "-n", "60"], ["baton", "ls"], ["baton", "status"]):
                print(container.run(*command, check=False)[1], file=sys.stderr)
        raise
    finally:
        container.end()
    print("all of it holds")


if __name__ == "__main__":
    main()

"""Debian systems with systemd on which the package is tried: one in a container, and the one that this runs on.

A container is made of the distribution's packages, and booted with systemd as its first process. What it needs of this machine: root,
mmdebstrap, systemd-nspawn, and whatever control groups are mounted. It has a network of its own with nothing but loopback, and ends with
`Container.end`, however that was reached.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

PACKAGES = "systemd,systemd-sysv,dbus,nginx-light,redis-server,man-db,bash-completion,iproute2,procps"
# Longer than the slowest of these steps takes on a machine that is busy with other tests; an emulated one needs more.
PATIENCE = int(os.environ.get("BATON_OPERATE_PATIENCE", "300"))
# Files whose contents change by themselves, of those whose contents are compared.
CHANGING = {"etc/ld.so.cache", "etc/machine-id", "etc/.updated"}
# What a container gets besides nspawn's usual set: Baton loads BPF programs.
CAPABILITIES = "CAP_BPF,CAP_PERFMON,CAP_NET_ADMIN,CAP_SYS_RESOURCE,CAP_SYS_ADMIN,CAP_SYS_NICE,CAP_SYS_PTRACE,CAP_IPC_LOCK"
CALLS = "bpf perf_event_open pidfd_getfd process_vm_readv @debug"


def step(text):
    print(f"▸ {text}", flush=True)


def wait_until(what, holds):
    """Waits for what no event tells of."""
    until = time.monotonic() + PATIENCE
    while not (got := holds()):
        assert time.monotonic() < until, f"{what}: not within {PATIENCE} s"
        time.sleep(0.1)  # Waits: the tools of the container offer no event for it; the bound is minutes.
    return got


def base(folder, name="base", more=""):
    """The system as an archive, which is made once. `more`: packages that it has besides."""
    archive = folder / f"{name}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
        sources = sorted(Path("/etc/apt/sources.list.d").glob("debian.sources")) or [Path("/etc/apt/sources.list")]
        # As apt is set up here.
        options = [f"--aptopt={path}" for path in sorted(Path("/etc/apt/apt.conf.d").glob("99*"))]
        made = archive.with_suffix(".new.tar")
        command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}{more}", "--dpkgopt=force-unsafe-io", *options]
        subprocess.run([*command, release["VERSION_CODENAME"].strip('"'), made, *sources], check=True)
        made.rename(archive)
    return archive


def groups():
    """Control groups of its own for the container: of this process's, in the hierarchies in which systemd keeps its units."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        places = {"name=systemd": ["systemd"], "": ["unified", "."]}.get(kind, [])
        parents = (Path("/sys/fs/cgroup") / place / path.lstrip("/") for place in places)
        found += [parent / f"baton-operate-{os.getpid()}" for parent in parents if (parent / "cgroup.procs").exists()]
    for group in found:
        group.mkdir()
    return found


def described(path, inside):
    """A file's kind, rights and owners; where a link leads; and of a file in /etc what is in it."""
    status = path.lstat()
    what = (stat.filemode(status.st_mode), status.st_uid, status.st_gid)
    if stat.S_ISLNK(status.st_mode):
        return (*what, os.readlink(path))
    if stat.S_ISREG(status.st_mode) and inside.startswith("etc/") and inside not in CHANGING:
        return (*what, hashlib.sha256(path.read_bytes()).hexdigest())
    return what


class System:
    """What both have in common. They say how a command gets inside: `enter`, `in_network`; and where the files are: `root`."""

    # Whether times that it needs are to be compared with what was promised.
    timed = True

    def run(self, *command, check=True):
        """Runs a command inside. Returns its status and all that it printed."""
        done = subprocess.run(
            self.enter(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE
        )
        output = done.stdout.decode(errors="replace")
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{output}")
        return done.returncode, output

    def says(self, *command):
        """What a command prints that succeeds."""
        return self.run(*command)[1].strip()

    def files(self):
        """Every file but those that change by themselves: logs, caches, what is in memory, and dpkg's own lists."""
        left_out = ["proc", "sys", "dev", "run", "tmp", "guest", "var/log", "var/cache", "var/tmp"]
        left_out += [f"var/lib/{name}" for name in ("dpkg", "apt", "systemd", "nginx", "redis")]
        found = {}
        for folder, folders, names in os.walk(self.root):
            inside = os.path.relpath(folder, self.root)
            folders[:] = [name for name in folders if os.path.normpath(os.path.join(inside, name)) not in left_out]
            for name in [*names, *folders]:
                path = os.path.normpath(os.path.join(inside, name))
                # What vanishes meanwhile is none of the package's.
                with contextlib.suppress(FileNotFoundError):
                    found[path] = described(self.root / path, path)
        return found


class Here(System):
    """The system that this runs on: a guest that was made for the test."""

    root = Path("/")
    timed = False

    def __init__(self):
        self.leader = os.getpid()

    def enter(self, *command):
        """The command itself."""
        return list(command)

    in_network = enter

    def end(self):
        """The guest is powered off by who has started it."""


class Container(System):
    def __init__(self, folder):
        self.groups = []
        self.root = Path(tempfile.mkdtemp(prefix="root-", dir=folder))
        self.root.chmod(0o755)
        self.process = self.leader = None
        try:
            subprocess.run(["tar", "-C", self.root, "--exclude=./dev/*", "-xf", base(folder)], check=True)
            # It does nothing but wait for a terminal that nobody uses.
            (self.root / "etc/systemd/system/console-getty.service").symlink_to("/dev/null")
        except BaseException:
            self.end()
            raise

    def boot(self):
        """Boots it, and returns when its systemd says that it is ready."""
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with tempfile.TemporaryDirectory() as folder, ready, open(self.root.parent / "boot.log", "wb") as log:
            ready.bind(f"{folder}/notify")
            ready.settimeout(PATIENCE)
            command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--notify-ready=yes", "--console=pipe"]
            command += [f"--directory={self.root}", f"--capability={CAPABILITIES}", f"--system-call-filter={CALLS}"]
            command += ["--bind=/dev/net/tun", "--boot"]
            environment = {**os.environ, "NOTIFY_SOCKET": f"{folder}/notify", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}
            self.groups = groups()
            # The shell joins them before it becomes nspawn.
            join = "".join(f"echo $$ > '{group}/cgroup.procs'; " for group in self.groups)
            command = ["sh", "-ec", join + 'exec "$@"', "sh", *command]
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            while True:
                lines = ready.recv(4096).decode().splitlines()
                for line in lines:
                    if line.startswith("X_NSPAWN_LEADER_PID="):
                        self.leader = int(line.split("=")[1])
                if "READY=1" in lines:
                    break
        if self.leader is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.leader = int(children[0])

    def enter(self, *command):
        """The command that runs another one inside."""
        clean = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "SYSTEMD_PAGER="]
        return ["nsenter", f"--target={self.leader}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd", *clean, *command]

    def in_network(self, *command):
        """The command that runs a program of this machine in the container's network."""
        return ["nsenter", f"--target={self.leader}", "--net", *command]

    def end(self):
        """Powers it off, or kills it, and removes its files."""
        if self.process:
            if self.leader:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.leader, signal.SIGRTMIN + 4)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                # All that is inside ends with its first process, which nspawn ends.
                self.process.kill()
                self.process.wait()
            self.process = None
        shutil.rmtree(self.root, ignore_errors=True)
        for group in self.groups:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
        self.groups = []

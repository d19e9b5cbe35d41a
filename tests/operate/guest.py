#!/usr/bin/env python3
"""Tries the package on the distribution's own kernels, in a guest under QEMU's TCG (no /dev/kvm needed). On Linux 6.12 all that package.py does
in a container, without times; on 6.1 the package installs, the service does not start, and doctor names a kernel to install.

    make guest KERNEL=6.12
    tests/operate/guest.py 6.12 target/debian/baton_*.deb
    tests/operate/guest.py 6.1 target/debian/baton_*.deb --console     the guest's console, too

The system is made once (target/operate/guest-VERSION.tar). An emulated machine is slow: half an hour is usual. Exit status 1 if a step fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from container import base, step

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "target/operate"
# The kernels' packages, and what package.py is given there.
KERNELS = {"6.12": ("linux-image-6.12-amd64", []), "6.1": ("linux-image-amd64", ["--old-kernel"])}
# What package.py needs besides what is in a container, since there the machine around it has that.
MORE = ",python3,nftables,util-linux,initramfs-tools"
# Seconds after which a guest counts as stuck, and those that it gives each of its steps.
LIMIT, PATIENCE = 7200, 1800
# The last line of a guest in which all holds.
WELL = "@status 0"

UNIT = """[Unit]
Description=The test of the package
After=multi-user.target

[Service]
Type=oneshot
Environment=LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 SYSTEMD_PAGER= BATON_OPERATE_PATIENCE=%(patience)d
ExecStart=/bin/sh -c 'python3 /guest/package.py --here %(options)s /guest/baton.deb; echo "@status $?"'
ExecStopPost=/bin/systemctl --no-block poweroff
TimeoutStartSec=infinity
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
"""


def system(kernel, folder):
    """The guest's files below a folder, with what the test needs."""
    root = folder / "root"
    root.mkdir()
    package, options = KERNELS[kernel]
    subprocess.run(["tar", "-C", root, "--exclude=./dev/*", "-xf", base(FOLDER, f"guest-{kernel}", f"{MORE},{package}")], check=True)
    units = root / "etc/systemd/system"
    (units / "guest.service").write_text(UNIT % {"options": " ".join(options), "patience": PATIENCE})
    wanted = units / "multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "guest.service").symlink_to("../guest.service")
    # The console is the test's. What apt and others do by the clock changes files meanwhile.
    timers = [f"{name}.timer" for name in ("apt-daily", "apt-daily-upgrade", "man-db", "dpkg-db-backup", "logrotate", "e2scrub_all", "fstrim")]
    for name in ["serial-getty@ttyS0.service", "getty@tty1.service", *timers]:
        (units / name).symlink_to("/dev/null")
    (root / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    (root / "etc/modules-load.d/tun.conf").write_text("tun\n")
    (root / "guest").mkdir()
    for path in Path(__file__).resolve().parent.glob("*.py"):
        shutil.copy(path, root / "guest")
    return root


def boot(root, folder):
    """Boots the guest. Returns what its console has shown when it was powered off, or has taken too long."""
    image, disk = sorted((root / "boot").glob("vmlinuz-*"))[-1], folder / "disk"
    initramfs = root / "boot" / image.name.replace("vmlinuz", "initrd.img")
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, disk, "6G"], check=True)
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2048", "-nographic", "-no-reboot", "-nic", "none",
        "-drive", f"file={disk},format=raw,if=virtio,cache=unsafe", "-kernel", image, "-initrd", initramfs,
        "-append", "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=no",
    ]
    with open(folder / "console", "w+b") as console:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            console.write(f"\nit has not ended within {LIMIT} s\n".encode())
        console.seek(0)
        return console.read().decode(errors="replace").replace("\r", "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=sorted(KERNELS))
    parser.add_argument("package")
    parser.add_argument("--console", action="store_true", help="print all that the guest printed")
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("it needs root, to make the guest's files")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guest-", dir=FOLDER) as folder:
        folder = Path(folder)
        step(f"makes a guest with Linux {given.kernel}")
        root = system(given.kernel, folder)
        shutil.copy(given.package, root / "guest/baton.deb")
        step("boots it")
        console = boot(root, folder)
    lines = console.splitlines()
    well = WELL in lines
    print("\n".join(lines if given.console or not well else [line for line in lines if line.startswith(("▸", "  "))]))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()

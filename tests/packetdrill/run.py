#!/usr/bin/env python3
"""Runs packetdrill scripts against the NIC's TCP and says how many pass.

    tests/packetdrill/run.py DIR... [--flags move=3] [--ip ipv4|ipv6|ipv4-mapped-ipv6] [--only WORD] [--json] [--kernel]

packetdrill is taken from $PACKETDRILL or PATH; it is not part of Baton. Every script runs in a network namespace of its own, since
scripts set sysctls; the adapter reads them there. A passing script exits with 0.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "target/release/libbaton_packetdrill.so"
V4 = ["--local_ip=192.168.0.1", "--gateway_ip=192.168.0.1", "--netmask_ip=255.255.0.0", "--remote_ip=192.0.2.1",
      "-D", "TFO_COOKIE=3021b9d889017eeb", "-D", "TFO_COOKIE_ZERO=b7c12350a90dc8f5", "-D", "CODE=host_unreachable"]
ARGUMENTS = {
    "ipv4": ["--ip_version=ipv4", *V4, "-D", "CMSG_LEVEL_IP=SOL_IP", "-D", "CMSG_TYPE_RECVERR=IP_RECVERR"],
    "ipv4-mapped-ipv6": ["--ip_version=ipv4-mapped-ipv6", *V4, "-D", "CMSG_LEVEL_IP=SOL_IPV6",
                         "-D", "CMSG_TYPE_RECVERR=IPV6_RECVERR"],
    "ipv6": ["--ip_version=ipv6", "--mtu=1520", "--local_ip=fd3d:0a0b:17d6::1", "--gateway_ip=fd3d:0a0b:17d6:8888::1",
             "--remote_ip=fd3d:fa7b:d17d::1", "-D", "TFO_COOKIE=c1d1e9742a47a9bc", "-D", "TFO_COOKIE_ZERO=82af1a8f9a205c34",
             "-D", "CODE=host_unreachable", "-D", "CMSG_LEVEL_IP=SOL_IPV6", "-D", "CMSG_TYPE_RECVERR=IPV6_RECVERR"],
}
# Scripts talk to tc, ip and ethtool about the device that packetdrill would have made.
NAMESPACE = "ip link set lo up; ip tuntap add tun0 mode tun 2>/dev/null && ip link set tun0 up; exec \"$@\""


def scripts(directories, family, only):
    """All scripts below the directories that are meant for a family of addresses."""
    other = "v6.pkt" if family != "ipv6" else "v4.pkt"
    for directory in directories:
        for path in sorted(pathlib.Path(directory).rglob("*.pkt")):
            if not path.name.endswith(other) and only in str(path):
                yield path


def command(options, path):
    """packetdrill in a namespace of its own."""
    unshare = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-Urn"]
    setup = [] if options.kernel else ["sh", "-c", NAMESPACE, "sh"]
    own = [line.split("=") for line in path.read_text(errors="replace").splitlines() if line.startswith("--")]
    # An option of the script's own counts, unless it is an address of the other family; packetdrill would let the command line win.
    own = [option[0] for option in own if not (options.ip == "ipv6" and option[0].endswith("_ip") and ":" not in option[-1])]
    arguments = [argument for argument in ARGUMENTS[options.ip] if argument.split("=")[0] not in own]
    line = [*unshare, *setup, options.packetdrill, *arguments]
    if not options.kernel:
        flags = ",".join(filter(None, [options.flags, "mtu=1520" if options.ip == "ipv6" else ""]))
        line += [f"--so_filename={options.adapter}", f"--so_flags={flags}"]
    return [*line, path.name]


def run(options, path):
    """Runs one script: None if it passes, else its first line of error."""
    environment = dict(os.environ)
    if not options.kernel:
        # packetdrill asks for TCP_INFO with the C library's getsockopt, which the adapter answers for its own descriptors.
        environment["LD_PRELOAD"] = str(options.adapter)
    try:
        done = subprocess.run(command(options, path), cwd=path.parent, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return f"still running after {options.timeout} s"
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    about = [line for line in lines if line.startswith(f"{path.name}:")]
    asserted = [line for line in lines if line.startswith("AssertionError")]
    if about and asserted:
        return f"{about[0]}: {asserted[-1]}"
    # A failed assertion of a script's Python code ends with what it is.
    return (about + lines[-1:] + [f"exit status {done.returncode}"])[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--flags", default="", help="--so_flags: move=N")
    parser.add_argument("--ip", choices=ARGUMENTS, default="ipv4")
    parser.add_argument("--only", default="", help="only scripts whose path has this in it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernel", action="store_true", help="the kernel's TCP, to compare")
    parser.add_argument("--adapter", default=ADAPTER, type=pathlib.Path)
    parser.add_argument("--timeout", default=30, type=int, help="seconds a script may take")
    parser.add_argument("--jobs", default=1, type=int)
    options = parser.parse_args()
    options.packetdrill = os.environ.get("PACKETDRILL") or shutil.which("packetdrill")
    if not options.packetdrill:
        sys.exit("packetdrill is not on PATH; name it with PACKETDRILL=/path/to/packetdrill")
    options.adapter = options.adapter.resolve()
    if not options.kernel and not options.adapter.exists():
        sys.exit(f"{options.adapter} is missing: make packetdrill-adapter")
    wanted = list(scripts(options.directories, options.ip, options.only))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        errors = dict(zip(map(str, wanted), pool.map(lambda path: run(options, path), wanted)))
    failures = {path: error for path, error in errors.items() if error}
    result = {"scripts": len(wanted), "passed": len(wanted) - len(failures), "ip": options.ip, "flags": options.flags,
              "failures": failures}
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for path, error in failures.items():
            print(f"{path}\n    {error}")
        print(f"{result['passed']} of {result['scripts']} scripts pass ({options.ip}{', ' + options.flags if options.flags else ''})")


if __name__ == "__main__":
    main()

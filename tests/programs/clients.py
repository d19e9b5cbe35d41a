#!/usr/bin/env python3
"""Load generators against servers under every rule of `baton run` and under --flip: they must see no error.

    tests/programs/clients.py                           # all that are installed
    tests/programs/clients.py --only wrk,ab --seconds 5
    tests/programs/clients.py --modes native,accepted

Prints requests per second and errors of each cell. It fails if a client sees an error under Baton that it does not see natively, or
hangs. It needs root, and works in a network namespace of its own, on the loopback device: client, server and NIC share the cores.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from programs import run_directory

HERE = Path(__file__).resolve().parent
BATON = Path(os.environ.get("BATON_PROGRAM", HERE.parent.parent / "target/release/baton"))
LENGTH = 256
PORT = 8080
MODES = {
    "native": None,
    "never": ["--rule", "never"],
    "default": [],
    "accepted": ["--rule", "accepted"],
    "established": ["--rule", "established"],
    "requests:3": ["--rule", "requests:3"],
    "flip": ["--flip", "1..50"],
}


def tool(name):
    for place in (shutil.which(name), f"/usr/sbin/{name}", f"/usr/local/go/bin/{name}"):
        if place and os.access(place, os.X_OK):
            return place
    return None


def number(pattern, text):
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0


# ---- servers: command, and what must be installed ---------------------------------------------------------------------------------


def nginx(directory):
    (directory / "www").mkdir()
    (directory / "www/file").write_bytes(b"x" * LENGTH)
    (directory / "www").chmod(0o755)
    (directory / "nginx.conf").write_text(f"""
        user root; daemon off; worker_processes 2; worker_rlimit_nofile 8192; pid {directory}/nginx.pid; error_log stderr warn;
        events {{ worker_connections 4096; }}
        http {{ access_log off; keepalive_requests 100000000; server {{ listen 127.0.0.1:{PORT}; root {directory}/www; }} }}""")
    return [tool("nginx"), "-e", "stderr", "-c", str(directory / "nginx.conf")]


def redis(directory):
    return [tool("redis-server"), "--port", str(PORT), "--dir", str(directory), "--save", "", "--protected-mode", "no"]


# ---- clients: their commands, and requests per second and errors from their output ----------------------------------------------

URL = f"http://127.0.0.1:{PORT}/file"


def wrk(seconds, *more):
    command = [tool("wrk"), "-t1", "-c64", f"-d{seconds}s", "--timeout", "10s", *more, URL]

    def judge(text):
        socket_errors = sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text)))
        return number(r"Requests/sec:\s+([\d.]+)", text), socket_errors + number(r"Non-2xx or 3xx responses: (\d+)", text)

    return command, judge


def ab(seconds, *more):
    command = [tool("ab"), "-q", "-c", "32", "-t", str(seconds), "-n", "100000000", "-s", "10", *more, URL]

    def judge(text):
        errors = number(r"Failed requests:\s+(\d+)", text) + number(r"Non-2xx responses:\s+(\d+)", text)
        return number(r"Requests per second:\s+([\d.]+)", text), errors

    return command, judge


def redis_benchmark(seconds, *more):
    # It has no time limit: about as many requests as a slow machine does in that time.
    count = str(int(20000 * seconds)) if "-k" not in more else str(int(3000 * seconds))
    command = [tool("redis-benchmark"), "-p", str(PORT), "-c", "50", "-n", count, "-t", "get,set", "-q", *more]

    def judge(text):
        rates = [float(rate) for rate in re.findall(r"(?:GET|SET): ([\d.]+) requests per second", text)]
        return sum(rates) / max(len(rates), 1), text.count("rror") + (len(rates) != 2)

    return command, judge


def hey(seconds, *more):
    command = [str(Path(os.environ["CLIENTS_BUILT"]) / "load"), "-c", "50", "-z", f"{seconds}s", "-length", str(LENGTH), *more, URL]

    def judge(text):
        return number(r"requests (\d+)", text) / seconds, number(r"errors (\d+)", text)

    return command, judge


ROWS = {
    "wrk": (nginx, wrk, []),
    "wrk, short": (nginx, wrk, ["-H", "Connection: close"]),
    "ab": (nginx, ab, ["-k"]),
    "ab, short": (nginx, ab, []),
    "hey-like": (nginx, hey, []),
    "hey-like, short": (nginx, hey, ["-disable-keepalive"]),
    "redis-benchmark": (redis, redis_benchmark, []),
    "redis-benchmark, short": (redis, redis_benchmark, ["-k", "0"]),
}
NEEDS = {nginx: "nginx", redis: "redis-server", wrk: "wrk", ab: "ab", redis_benchmark: "redis-benchmark", hey: "go"}


def await_port(server):
    end = time.monotonic() + 20
    while True:
        probe = subprocess.run(["bash", "-c", f"</dev/tcp/127.0.0.1/{PORT}"], capture_output=True, check=False)
        if probe.returncode == 0:
            return
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the server does not listen")
        # Waits: between two looks.
        time.sleep(0.02)


def cell(serve, client, more, mode, seconds):
    """Requests per second, and errors."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        command = serve(directory)
        log = directory / "baton.log"
        if MODES[mode] is not None:
            command = [str(BATON), "run", "--log", str(log), *MODES[mode], "--", *command]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await_port(server)
            words, judge = client(seconds, *more)
            ran = subprocess.run(words, capture_output=True, text=True, timeout=10 * seconds + 60, check=False)
            text = ran.stdout + ran.stderr
            rate, errors = judge(text)
            errors += ran.returncode != 0
            if errors:
                print(text[-2000:], file=sys.stderr)
        except subprocess.TimeoutExpired:
            rate, errors = 0.0, float("inf")
        finally:
            server.terminate()
            server.wait(20)
            # The Baton that was started for the server has ended when its directory is removed.
            end = time.monotonic() + 20
            while run_directory(server.pid) and time.monotonic() < end:
                # Waits: between two looks.
                time.sleep(0.02)
        said = log.read_text() if log.exists() else ""
        if said:
            print(said, file=sys.stderr)
            errors += 1
        return rate, errors


def build():
    if tool("go"):
        built = tempfile.mkdtemp()
        os.environ["CLIENTS_BUILT"] = built
        go = {"GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
        subprocess.run([tool("go"), "build", "-o", f"{built}/load", str(HERE / "load.go")], check=True, env=os.environ | go)
        return built
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="clients, by the beginning of their names, with commas")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}")
    parser.add_argument("--seconds", type=float, default=2, help="of each cell")
    parser.add_argument("--all", action="store_true", help="fail if a program is missing")
    given = parser.parse_args()
    if "CLIENTS_INSIDE" not in os.environ:
        words = ["unshare", "-n", "--", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, *sys.argv]
        os.execvpe(words[0], words, os.environ | {"CLIENTS_INSIDE": "1"})
    os.environ.pop("BATON_SOCKET", None)
    wanted = [name for name in ROWS if not given.only or any(name.startswith(part) for part in given.only.split(","))]
    built = build() if any(ROWS[name][1] is hey for name in wanted) else None
    failed = False
    for name in wanted:
        serve, client, more = ROWS[name]
        missing = [NEEDS[part] for part in (serve, client) if not tool(NEEDS[part])]
        if missing:
            print(f"{name:24} not run: {', '.join(missing)} missing")
            failed |= given.all
            continue
        native = 0
        for mode in given.modes.split(","):
            rate, errors = cell(serve, client, more, mode, int(max(given.seconds, 1)))
            if mode == "native":
                native = errors
            wrong = errors > native
            failed |= wrong
            print(f"{name:24} {mode:12} {rate:>10.0f}/s {errors:>5.0f} errors{'  WRONG' if wrong else ''}", flush=True)
    if built:
        shutil.rmtree(built, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

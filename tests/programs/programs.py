#!/usr/bin/env python3
"""Whole programs: each serves or fetches the same bytes natively, under `baton run`, under `baton run --flip 1..50`, and some under
`baton attach --flip 5..50`; every byte is compared. Prints a table; with --json, one object per line.

A pass needs moves: `EXPECTED` has for each program the least number under flip, and the causes for which its connections may go back.

    tests/programs/programs.py                      # everything that is installed here
    tests/programs/programs.py --only nginx,redis --seconds 10
    tests/programs/programs.py --network nat        # the programs in a container, behind a router that translates
    tests/programs/programs.py --network wire       # full offload: the NIC, between kernel and wire, makes the connections
    tests/programs/programs.py --network own        # the same at an address of the NIC's own

It needs root, makes network namespaces of its own, and says which programs are missing. `--all` fails if any is.
"""

import argparse
import contextlib
import hashlib
import http.client
import http.server
import json
import os
import random
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BATON = Path(os.environ.get("BATON_PROGRAM", HERE.parent.parent / "target/release/baton"))
MODES = ("native", "run", "flip", "attach")
# With a NIC between kernel and wire, and with one that has an address of its own there.
WIRES = ("wire", "own")
WIRE_MODES = ("native", "full")

# The least number of moves in four seconds, under flip and attached, and the causes of restores, apart from random moves:
#   fork            a child has the socket, too: the connection is in the kernel until the child has closed it. redis starts one
#                   for BGSAVE, rsync and sshd for each session.
#   option          ssh marks its packets (IP_TOS), which only the kernel can set; then the connection may move again.
#   end of stream   attached: the peer has closed, and only the kernel can put that into the program's queue.
#   detached        attached: the end of the trial.
ATTACHED_CAUSES = {"end of stream", "detached"}
EXPECTED = {
    "nginx": (300, 200, set()),
    "redis": (60, 150, {"fork"}),
    "memcached": (60, 0, set()),
    "haproxy": (400, 0, set()),
    "haproxy confined": (400, 0, set()),
    "python asyncio": (200, 0, set()),
    "python uvloop": (200, 0, set()),
    "python selectors": (200, 0, set()),
    "python ssl": (200, 0, set()),
    "python http.server": (250, 0, set()),
    "python socketserver": (200, 0, set()),
    "python fork": (150, 0, {"fork"}),
    "node": (200, 0, set()),
    "java nio": (200, 0, set()),
    "curl": (20, 0, set()),
    "iperf3 server": (60, 0, set()),
    "iperf3 client": (120, 0, set()),
    "rsync daemon": (20, 0, {"fork"}),
    # Two processes share its socket nearly all the time.
    "rsync client": (2, 0, {"fork"}),
    "sshd": (20, 0, {"fork", "option"}),
    "ssh": (25, 0, {"option"}),
    "go server": (0, 250, set()),
    "go client": (0, 100, set()),
}
# The least number of connections that the NIC makes in full offload: of clients, and of servers, whose load waits for the first one.
MADE = {"haproxy": 4, "haproxy confined": 4, "curl": 1, "iperf3 client": 5, "rsync client": 1, "ssh": 1, "iperf3 server": 2, "rsync daemon": 2, "sshd": 2}
# The control connection.
MADE |= {"iperf3 udp server": 1, "iperf3 udp client": 1}
MADE_BY_SERVERS = 7
# Their listeners stay with the kernel: SO_REUSEPORT.
LISTEN_IN_KERNEL = {"haproxy", "haproxy confined"}


# Networks, with the addresses at which a tried program listens, at which it is reached, and at which this script's own servers are:
#   plain     the loopback device
#   ipv6      the same
#   firewall  the same behind a stateful firewall that drops what its tracker finds invalid
#   nat       the tried program in a container: its port is published by a router that also hides it, and drops what is invalid
#   wire      the tried program on a host whose NIC is between kernel and wire, and this script on another one (`baton hosts`)
#   own       the same, but the tried program uses the NIC's own address, also where it is a client
NETWORKS = {
    "plain": ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    "ipv6": ("::1", "::1", "::1"),
    "firewall": ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
    "nat": ("10.0.2.2", "10.0.1.1", "10.0.1.2"),
    "wire": ("10.77.0.1", "10.77.0.1", "10.77.0.2"),
    "own": ("10.77.0.50", "10.77.0.50", "10.77.0.2"),
}
NETWORK = os.environ.get("BATON_PROGRAMS_NETWORK", "plain")
LISTENS, REACHED, OURS = NETWORKS[NETWORK]
# Options by which clients under test bind to the NIC's own address.
FROM = {"curl": "--interface", "iperf3": "-B", "rsync": "--address", "ssh": "-b"} if NETWORK == "own" else {}
FAMILY = socket.AF_INET6 if ":" in LISTENS else socket.AF_INET

WALL = """
table inet wall {
    chain in { type filter hook %s priority 0; ct state invalid counter drop; }
    chain out { type filter hook output priority 0; ct state invalid counter drop; }
}
"""
ROUTER = """
table ip nat {
    chain in { type nat hook prerouting priority dstnat; ip daddr 10.0.1.1 meta l4proto tcp dnat to 10.0.2.2; }
    chain out { type nat hook postrouting priority srcnat; oifname "outside" masquerade; }
}
"""


def from_own(name):
    """The beginning of a client's command."""
    return [tool(name), *([FROM[name], LISTENS] if name in FROM else [])]


def bracketed(address):
    return f"[{address}]" if ":" in address else address


class Missing(Exception):
    """A program that is not installed."""


class Wrong(Exception):
    """Bytes that differ, or a program that failed."""


def tool(name):
    for place in (shutil.which(name), f"/usr/sbin/{name}", f"/usr/local/go/bin/{name}"):
        if place and os.access(place, os.X_OK):
            return place
    raise Missing(name)


def check(holds, text):
    if not holds:
        raise Wrong(text)


def run_directory(process):
    """The directory of the Baton that was started for a program, while it is there (docs/guide/run.md)."""
    bases = [os.environ.get("TMPDIR"), "/run/baton" if os.getuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")]
    bases += Path(tempfile.gettempdir()).glob(f"baton-of-{os.getuid()}-*")
    places = [Path(base) / f"baton-run-{process}" for base in bases if base]
    return next((place for place in places if place.exists()), None)


class Trial:
    """One program in one mode. Everything that it starts ends with it."""

    def __init__(self, name, mode, seconds, directory):
        self.name, self.mode, self.seconds, self.directory = name, mode, seconds, directory
        self.processes, self.report = [], directory / "report.json"
        self.attacher = None
        self.work = 0

    def under_baton(self, command, **options):
        """Starts the program under test."""
        prefix = inside()
        if self.mode == "full":
            prefix += [str(BATON), "run", "--offload", "full", "--flip-report", str(self.report), "--"]
            self.made = made_by_nic()
        elif self.mode in ("run", "flip"):
            prefix += [str(BATON), "run", "--log", str(self.directory / "baton.log")]
            prefix += ["--flip-report", str(self.report)]
            prefix += ["--flip", "1..50"] if self.mode == "flip" else ["--eager", "--rule", "established"]
            prefix.append("--")
        options["env"] = options.get("env", os.environ) | {"LISTENS": LISTENS}
        return self.start(prefix + command, **options)

    def start(self, command, **options):
        log = open(self.directory / "messages", "ab")
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": self.directory} | options
        process = subprocess.Popen([str(word) for word in command], **options)
        self.processes.append(process)
        return process

    def attach(self, process):
        """Attaches to the program, which runs and listens, if the mode says so."""
        if self.mode == "attach":
            command = [*inside(), BATON, "attach", "--flip", "5..50", "--flip-report", self.report, "--json", process.pid]
            self.attacher = self.start(command, stdout=subprocess.DEVNULL)
            self.await_that(lambda: self.report.exists() and self.report.stat().st_size > 0, "the attacher")

    def await_that(self, what, name):
        end = time.monotonic() + 20
        while not what():
            check(time.monotonic() < end, f"{name} does not come about")
            # Waits: between two looks.
            time.sleep(0.01)

    def await_port(self, port, address=None):
        def listens():
            # Behind a router a connect to a port without a listener may get no answer.
            with contextlib.suppress(OSError), socket.create_connection((address or REACHED, port), 1):
                return True
            return False

        self.await_that(listens, f"port {port}")
        # The NIC makes a server's connections from its first wait on.
        if self.mode == "full" and address in (None, LISTENS) and self.name not in LISTEN_IN_KERNEL:
            self.await_that(lambda: listens() and made_by_nic() > self.made, "the NIC's first connection")

    def finish(self, process):
        """Runs a program that ends by itself."""
        check(process.wait(120) == 0, f"{process.args[-1]} ended with {process.returncode}")

    def end(self):
        if self.attacher:
            self.attacher.send_signal(signal.SIGINT)
            self.attacher.wait(20)
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def result(self):
        """The report, once the Baton that was started for the program has ended."""
        if self.mode == "native":
            return {}
        users = [self.attacher] if self.attacher else self.processes
        places = [Path(tempfile.gettempdir()) / f"baton-run-{process.pid}" for process in users]
        self.await_that(lambda: not any(place.exists() for place in places), "the end of Baton")
        if self.mode == "full":
            # This Baton goes on: it reports when it has noticed the program's end.
            self.await_that(lambda: json.loads(self.report.read_text())["connections"], "the report")
        report = json.loads(self.report.read_text())
        return report | {"made": made_by_nic() - self.made} if self.mode == "full" else report


def free_port():
    with socket.create_server((OURS, 0), family=FAMILY) as probe:
        return probe.getsockname()[1]


def together(count, work):
    """Runs `work(number)` in threads; the first failure is raised."""
    failures = []

    def guarded(number):
        try:
            work(number)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it is raised again
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# ---- loads -----------------------------------------------------------------------------------------------------------------------


def make_files(directory, lengths=(100, 5000, 70_000, 3_000_000)):
    """Files by name, with their bytes."""
    directory.mkdir()
    files = {f"f{length}": random.Random(length).randbytes(length) for length in lengths}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    directory.chmod(0o755)
    return files


def http_load(trial, port, files, connections=8, alive=True):
    def fetch(number):
        chance, end = random.Random(number), time.monotonic() + trial.seconds
        link = http.client.HTTPConnection(REACHED, port, timeout=30)
        while time.monotonic() < end:
            name = chance.choice(list(files))
            link.request("GET", f"/{name}", headers={} if alive else {"Connection": "close"})
            answer = link.getresponse().read()
            check(answer == files[name], f"/{name} came wrong")
            trial.work += 1
        link.close()

    together(connections, fetch)


def echo_load(trial, port, connections=6, wrap=lambda sock: sock):
    def talk(number):
        chance, end = random.Random(number), time.monotonic() + trial.seconds
        with wrap(socket.create_connection((REACHED, port), 30)) as sock:
            while time.monotonic() < end:
                sent = chance.randbytes(chance.choice((1, 64, 1500, 40_000)))
                sock.sendall(sent)
                got = bytearray()
                while len(got) < len(sent):
                    piece = sock.recv(65536)
                    check(piece, "the server closed")
                    got += piece
                check(got == sent, "an echo came wrong")
                trial.work += 1

    together(connections, talk)


@contextlib.contextmanager
def web_server(files, directory):
    """An HTTP server of this script's own, for clients."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def __init__(self, *given):
            super().__init__(*given, directory=directory)

        def log_message(self, *_):
            pass

        def handle(self):
            # Clients that have got what they want disconnect.
            with contextlib.suppress(ConnectionError):
                super().handle()

    class Server(http.server.ThreadingHTTPServer):
        address_family = FAMILY

    server = Server((OURS, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


# ---- servers ---------------------------------------------------------------------------------------------------------------------


def nginx(trial):
    files, port = make_files(trial.directory / "www"), free_port()
    (trial.directory / "nginx.conf").write_text(f"""
        user root; daemon off; worker_processes 2; pid {trial.directory}/nginx.pid; error_log stderr warn;
        events {{ worker_connections 1024; }}
        http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000;
                server {{ listen {bracketed(LISTENS)}:{port}; root {trial.directory}/www; }} }}""")
    process = trial.under_baton([tool("nginx"), "-e", "stderr", "-c", trial.directory / "nginx.conf"])
    trial.await_port(port)
    trial.attach(process)
    http_load(trial, port, files)


class Redis:
    """A connection that speaks the protocol of redis."""

    def __init__(self, port):
        self.sock = socket.create_connection((REACHED, port), 30)
        self.file = self.sock.makefile("rb")

    def ask(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
        line = self.file.readline()
        if line[:1] != b"$":
            return line.strip()
        return self.file.read(int(line[1:]) + 2)[:-2]


def redis(trial):
    port = free_port()
    process = trial.under_baton([tool("redis-server"), "--bind", LISTENS, "--protected-mode", "no", "--port", port, "--dir", trial.directory, "--save", ""])
    trial.await_port(port)
    trial.attach(process)

    def use(number):
        chance, end, link, asked = random.Random(number), time.monotonic() + trial.seconds, Redis(port), 0
        while time.monotonic() < end:
            key, value = f"k{number}.{chance.randrange(50)}", chance.randbytes(chance.choice((3, 300, 30_000, 200_000)))
            check(link.ask("SET", key, value) == b"+OK", "SET failed")
            check(link.ask("GET", key) == value, "GET gave something else")
            asked += 1
            if number == 0 and asked % 50 == 0:
                check(link.ask("BGSAVE")[:1] in b"+-", "BGSAVE failed")
            trial.work += 1

    together(6, use)


def memcached(trial):
    port = free_port()
    trial.under_baton([tool("memcached"), "-l", LISTENS, "-p", port, "-U", 0, "-u", "root"])
    trial.await_port(port)

    def use(number):
        chance, end = random.Random(number), time.monotonic() + trial.seconds
        sock = socket.create_connection((REACHED, port), 30)
        file = sock.makefile("rb")
        while time.monotonic() < end:
            value = chance.randbytes(chance.choice((3, 300, 30_000, 200_000)))
            sock.sendall(b"set k%d 0 0 %d\r\n%s\r\n" % (number, len(value), value))
            check(file.readline() == b"STORED\r\n", "set failed")
            sock.sendall(b"get k%d\r\n" % number)
            check(file.readline().startswith(b"VALUE"), "get failed")
            check(file.read(len(value)) == value and file.read(7) == b"\r\nEND\r\n", "get gave something else")
            trial.work += 1

    together(6, use)


def haproxy_confined(trial):
    """As distributions configure it: in an empty root directory, and as another user."""
    (trial.directory / "root").mkdir()
    haproxy(trial, f"""
global
    chroot {trial.directory / "root"}
    uid 65534
    gid 65534
""")


def haproxy(trial, settings=""):
    files, port = make_files(trial.directory / "www"), free_port()
    with web_server(files, trial.directory / "www") as backend:
        (trial.directory / "haproxy.cfg").write_text(settings + f"""
defaults
    mode http
    timeout connect 10s
    timeout client 30s
    timeout server 30s
frontend f
    bind {LISTENS}:{port}
    default_backend b
backend b
    server s {OURS}:{backend}
""")
        trial.under_baton([tool("haproxy"), "-db", "-f", trial.directory / "haproxy.cfg"])
        trial.await_port(port)
        http_load(trial, port, files)


def announced(trial, command, load, **options):
    process = trial.under_baton(command, stdout=subprocess.PIPE, **options)
    port = int(process.stdout.readline())
    if trial.mode == "full":
        trial.await_port(port)
    trial.attach(process)
    load(port)


def python_server(way):
    return lambda trial: announced(trial, [sys.executable, HERE / "servers.py", way], lambda port: echo_load(trial, port))


def python_uvloop(trial):
    """Its libuv registers sockets by a ring of io_uring."""
    python = HERE.parent.parent / "target/python/bin/python"
    if not python.exists():
        raise Missing("uvloop (scripts/dependencies tests)")
    announced(trial, [python, HERE / "servers.py", "uvloop"], lambda port: echo_load(trial, port))


def python_ssl(trial):
    certificate = trial.directory / "certificate.pem"
    command = [tool("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", certificate, "-out", trial.directory / "c"], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + (trial.directory / "c").read_text())
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    command = [sys.executable, HERE / "servers.py", "ssl", certificate]
    announced(trial, command, lambda port: echo_load(trial, port, wrap=context.wrap_socket))


def python_http(trial):
    files, port = make_files(trial.directory / "www"), free_port()
    trial.under_baton([sys.executable, "-m", "http.server", "--bind", LISTENS, "--protocol", "HTTP/1.1", port], cwd=trial.directory / "www")
    trial.await_port(port)
    http_load(trial, port, files)


def node(trial):
    announced(trial, [tool("node"), HERE / "echo.js"], lambda port: echo_load(trial, port))


def java(trial):
    announced(trial, [tool("java"), HERE / "Echo.java"], lambda port: echo_load(trial, port))


def go_program(trial):
    program = trial.directory / "files"
    environment = os.environ | {"CGO_ENABLED": "0", "GOCACHE": str(trial.directory / "cache"), "GO111MODULE": "off"}
    subprocess.run([tool("go"), "build", "-o", program, HERE / "files.go"], check=True, env=environment)
    return program


def go_server(trial):
    files = make_files(trial.directory / "www")
    announced(trial, [go_program(trial), "serve", trial.directory / "www"], lambda port: http_load(trial, port, files))


# ---- clients ---------------------------------------------------------------------------------------------------------------------


def go_client(trial):
    files = make_files(trial.directory / "www")
    with web_server(files, trial.directory / "www") as port:
        words = [word for name, content in files.items() for word in (name, hashlib.sha256(content).hexdigest())]
        command = [go_program(trial), "fetch", f"{bracketed(OURS)}:{port}", *words]
        process = trial.under_baton(command, stdout=subprocess.PIPE, env=os.environ | {"SECONDS": str(trial.seconds)})
        trial.attach(process)
        trial.work = int(process.stdout.readline() or 0)
        trial.finish(process)


def curl(trial):
    length = 20_000_000
    files = make_files(trial.directory / "www", (length,))
    with web_server(files, trial.directory / "www") as port:
        count = max(1, int(trial.seconds / 2))
        script = f"for n in $(seq {count}); do {' '.join(from_own('curl'))} -sS --noproxy '*' --limit-rate 10M -o got.$n http://{bracketed(OURS)}:{port}/f{length} || exit 1; done"
        trial.finish(trial.under_baton(["/bin/sh", "-c", script]))
        for number in range(1, count + 1):
            check((trial.directory / f"got.{number}").read_bytes() == files[f"f{length}"], f"download {number} came wrong")
            trial.work += 1


def iperf3_server(trial):
    port = free_port()
    server = trial.under_baton([tool("iperf3"), "-s", "-1", "-p", port, "-B", LISTENS])
    client = [tool("iperf3"), "-c", REACHED, "-p", port, "-t", int(trial.seconds), "-P", 2, "--connect-timeout", 1000]
    end = time.monotonic() + 20
    while (process := trial.start(client)).wait() != 0:
        check(time.monotonic() < end and server.poll() is None, "the client failed")
        # Waits: between two looks.
        time.sleep(0.05)
    trial.finish(server)
    trial.work = 1


def iperf3_client(trial):
    port = free_port()
    server = trial.start([tool("iperf3"), "-s", "-p", port, "-B", OURS])
    # The server serves one client at a time, and a probe whether it listens counts as one.
    trial.await_that(lambda: any(f":{port:04X} " in Path("/proc/net/" + table).read_text() for table in ("tcp", "tcp6")), "the server")
    trial.finish(trial.under_baton([*from_own("iperf3"), "-c", OURS, "-p", port, "-t", int(trial.seconds), "-P", 2, "--bidir"]))
    server.terminate()
    trial.work = 1


def iperf3_udp(trial, client):
    """Datagrams of a moderate rate both ways at once: few may be lost, and in full offload the NIC has them."""
    port, rate, before = free_port(), 20_000_000, datagrams_of_nic() if trial.mode == "full" else 0
    server = [tool("iperf3"), "-s", "-p", port, "-B", OURS if client else LISTENS]
    sender = [*(from_own("iperf3") if client else [tool("iperf3")]), "-c", OURS if client else REACHED, "-p", port, "-t", int(trial.seconds), "-u", "-b", rate, "-l", 1200]
    sender += ["--bidir", "--json", "--logfile", trial.directory / "datagrams.json"]
    (trial.start if client else trial.under_baton)(server)
    # The probes are clients that say nothing, of which the server gets rid at once.
    trial.await_port(port, OURS if client else REACHED)
    trial.finish((trial.under_baton if client else trial.start)(sender))
    streams = [stream["udp"] for stream in json.loads((trial.directory / "datagrams.json").read_text())["end"]["streams"]]
    check(len(streams) == 2, f"{len(streams)} streams, not one each way")
    for way in streams:
        share = way["packets"] * 1200 * 8 / (rate * int(trial.seconds))
        check(0.9 < share < 1.1 and way["lost_percent"] < 5, f"{share:.2f} of the datagrams were sent, {way['lost_percent']:.1f} % were lost")
        trial.work += way["packets"] - way["lost_packets"]
    if trial.mode == "full":
        by_nic = datagrams_of_nic() - before
        check(by_nic > 0.9 * trial.work, f"only {by_nic} of {trial.work} datagrams went by the NIC")


def tree(directory):
    directory.mkdir()
    for number in range(40):
        (directory / str(number)).write_bytes(random.Random(number).randbytes(200_000 + 1000 * number))


def same(one, other):
    names = sorted(path.name for path in one.iterdir())
    check(names == sorted(path.name for path in other.iterdir()), "files are missing")
    check(all((one / name).read_bytes() == (other / name).read_bytes() for name in names), "files differ")


def rsync(trial, client):
    tree(trial.directory / "from")
    port = free_port()
    configuration = trial.directory / "rsyncd.conf"
    configuration.write_text(f"port = {port}\naddress = {OURS if client else LISTENS}\nuse chroot = no\nuid = root\ngid = root\n[all]\npath = {trial.directory}/from\n")
    daemon = [tool("rsync"), "--daemon", "--no-detach", f"--config={configuration}"]
    (trial.start if client else trial.under_baton)(daemon)
    trial.await_port(port, OURS if client else REACHED)
    rounds = max(1, int(trial.seconds / 2))
    fetch = f"{' '.join(from_own('rsync') if client else [tool('rsync')])} -a --bwlimit=8M rsync://{bracketed(OURS if client else REACHED)}:{port}/all/ "
    script = " && ".join(f"{fetch} {trial.directory}/to{number}/" for number in range(rounds))
    trial.finish((trial.under_baton if client else trial.start)(["/bin/sh", "-c", script]))
    for number in range(rounds):
        same(trial.directory / "from", trial.directory / f"to{number}")
        trial.work += 1


def ssh(trial, client):
    port, directory = free_port(), trial.directory
    for name in ("host", "user"):
        subprocess.run([tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    (directory / "authorized").write_text((directory / "user.pub").read_text())
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {"Port": port, "ListenAddress": OURS if client else LISTENS, "HostKey": directory / "host", "PidFile": "none", "UsePAM": "no"}
    options |= {"AuthorizedKeysFile": directory / "authorized", "StrictModes": "no", "PermitRootLogin": "yes"}
    (directory / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    daemon = [tool("sshd"), "-D", "-e", "-f", directory / "sshd_config"]
    (trial.start if client else trial.under_baton)(daemon)
    trial.await_port(port, OURS if client else REACHED)
    content = random.Random(1).randbytes(20_000_000)
    (directory / "content").write_bytes(content)
    rounds = max(1, int(trial.seconds / 2))
    words = f"{' '.join(from_own('ssh') if client else [tool('ssh')])} -F none -i {directory}/user -p {port} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null root@{OURS if client else REACHED}"
    # Waits: both ways are silent for a while; the result is the same if that is shorter.
    both_ways = f"{words} 'cat; sleep 0.5; cat {directory}/content' < {directory}/content"
    script = " && ".join(f"{both_ways} > got.{number}" for number in range(rounds))
    trial.finish((trial.under_baton if client else trial.start)(["/bin/sh", "-c", script]))
    for number in range(rounds):
        check((directory / f"got.{number}").read_bytes() == content * 2, "what ssh brought is wrong")
        trial.work += 1


PROGRAMS = {
    "nginx": nginx,
    "redis": redis,
    "memcached": memcached,
    "haproxy": haproxy,
    "haproxy confined": haproxy_confined,
    "python asyncio": python_server("asyncio"),
    "python uvloop": python_uvloop,
    "python selectors": python_server("selectors"),
    "python ssl": python_ssl,
    "python http.server": python_http,
    "python socketserver": python_server("socketserver"),
    "python fork": python_server("fork"),
    "node": node,
    "java nio": java,
    "curl": curl,
    "iperf3 server": iperf3_server,
    "iperf3 client": iperf3_client,
    "iperf3 udp server": lambda trial: iperf3_udp(trial, client=False),
    "iperf3 udp client": lambda trial: iperf3_udp(trial, client=True),
    "rsync daemon": lambda trial: rsync(trial, client=False),
    "rsync client": lambda trial: rsync(trial, client=True),
    "sshd": lambda trial: ssh(trial, client=False),
    "ssh": lambda trial: ssh(trial, client=True),
    "go server": go_server,
    "go client": go_client,
}
ATTACHED = {"nginx", "redis", "go server", "go client"}
# Static: nothing can be preloaded.
STATIC = {"go server", "go client"}
# Their datagrams go by the NIC in full offload only.
DATAGRAMS = {"iperf3 udp server", "iperf3 udp client"}


def modes_of(name):
    modes = WIRE_MODES if NETWORK in WIRES else [] if name in DATAGRAMS else MODES
    return [mode for mode in modes if not (mode == "attach" and name not in ATTACHED or mode in ("run", "flip", "full") and name in STATIC)]


class TooFew(str):
    """A failed check that a longer trial may pass: other work on the machine leaves time for few moves."""


def judge(name, mode, report, seconds):
    """The checks that failed."""
    if mode == "native":
        return []
    wrong = [f"{report[what]} {what}" for what in ("resets", "errors") if report[what]]
    if mode == "full":
        least = MADE.get(name, MADE_BY_SERVERS)
        return wrong + ([f"the NIC made only {report['made']} connections, not {least}"] if report["made"] < least else [])
    if mode == "run":
        return wrong
    flipped, attached, causes = EXPECTED[name]
    # Short trials spend much of their time on starting.
    share = 1 if seconds >= 4 else seconds / 8
    least = max(1, int((attached if mode == "attach" else flipped) * share))
    if report["moves"] < least:
        wrong.append(TooFew(f"only {report['moves']} moves, not {least}"))
    known = causes | ATTACHED_CAUSES if mode == "attach" else causes
    wrong += [f"went back for {cause!r}" for cause in report["given_back"] if cause not in known]
    return wrong


def trial_of(name, mode, seconds):
    """One trial; one with too few moves, and nothing else wrong, once more and longer."""
    row = one_trial(name, mode, seconds, seconds)
    failures = row["failures"]
    return one_trial(name, mode, 4 * seconds, seconds) if failures and all(isinstance(one, TooFew) for one in failures) else row


def one_trial(name, mode, seconds, judged_as):
    with tempfile.TemporaryDirectory(prefix="baton-programs-") as directory:
        os.chmod(directory, 0o755)
        trial = Trial(name, mode, seconds, Path(directory))
        row = {"program": name, "mode": mode, "failures": []}
        try:
            try:
                PROGRAMS[name](trial)
            finally:
                trial.end()
            report = trial.result()
            row |= {"work": trial.work} | report
            row["failures"] = judge(name, mode, report, judged_as) + ([] if trial.work else ["nothing was done"])
        except Missing:
            raise
        except Exception as failure:  # noqa: BLE001 - the table has it
            messages = (trial.directory / "messages").read_text(errors="replace")[-600:] if (trial.directory / "messages").exists() else ""
            row["failures"] = [f"{type(failure).__name__}: {failure}", messages.strip()]
        return row


def show(row):
    given = ", ".join(f"{cause} {count}" for cause, count in row.get("given_back", {}).items())
    moves, connections = row.get("made", row.get("moves", "")), row.get("connections", "")
    state = "; ".join(filter(None, row["failures"])) or "ok"
    print(f"{row['program']:<20} {row['mode']:<7} {row.get('work', 0):>7} {connections:>6} {moves:>6}  {state}  {given}", flush=True)


def counters_of_nic():
    shown = subprocess.run([BATON, "nic", "show", "--json"], check=True, capture_output=True).stdout
    return json.loads(shown)["counters"]


def made_by_nic():
    """How many connections the NIC has made so far."""
    return counters_of_nic()["connections_made"]


def datagrams_of_nic():
    """How many datagrams of programs the NIC has received and sent so far."""
    counters = counters_of_nic()
    return counters["received_datagrams"] + counters["sent_datagrams"]


def join_hosts(script, network):
    """Continues on the second of two hosts, of which the first has a NIC between kernel and wire."""
    own = ["--address", f"{NETWORKS[network][0]}/24", "--probe-interval", "100"] if network == "own" else []
    directory = tempfile.mkdtemp(prefix="baton-programs-")
    words = " ".join(shlex.quote(str(word)) for word in [sys.executable, script, *sys.argv[1:]])
    os.mkfifo(f"{directory}/end")
    peer = f"{words}; echo $? > {directory}/end"
    first = f"trap 'rm -r {directory}' EXIT; echo $$ > {directory}/process; read status < {directory}/end; exit $status"
    environment = {"BATON_PROGRAMS_INSIDE": "1", "BATON_PROGRAMS_NETWORK": network, "BATON_PROGRAMS_HOST": f"{directory}/process"}
    os.execve(BATON, [BATON, "hosts", *own, "--peer", peer, "--", "/bin/sh", "-c", first], os.environ | environment)


def isolate(script, network="plain"):
    """Continues in a network namespace of its own, with the namespaces that the network needs around it."""
    if os.environ.get("BATON_PROGRAMS_INSIDE") != "1":
        if network in WIRES:
            join_hosts(script, network)
        around = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, script, *sys.argv[1:]]
        os.execvpe("unshare", around, os.environ | {"BATON_PROGRAMS_INSIDE": "1", "BATON_PROGRAMS_NETWORK": network})


def namespace():
    """Another network namespace: a process in it, which ends when its standard input is closed."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    mine = os.stat("/proc/self/ns/net").st_ino
    while os.stat(f"/proc/{holder.pid}/ns/net").st_ino == mine:
        # Waits: between two looks.
        time.sleep(0.001)
    return holder


class FirstHost:
    """The host of the programs under test, which this script has not started."""

    def __init__(self):
        place = Path(os.environ["BATON_PROGRAMS_HOST"])
        while not (place.exists() and place.read_text().strip()):
            # Waits: between two looks.
            time.sleep(0.01)
        self.pid = int(place.read_text())


CONTAINER = None


def inside():
    """The prefix of a command that is to run in the namespace of the program under test."""
    return [] if CONTAINER is None else ["nsenter", f"--net=/proc/{CONTAINER.pid}/ns/net"]


def build(network):
    """Makes the network around this namespace. Returns the counters of invalid packets, and what has to be ended."""
    global CONTAINER
    if network in ("plain", "ipv6"):
        return lambda: 0, []
    if network in WIRES:
        CONTAINER = FirstHost()
        for prefix in ([], inside()):
            subprocess.run([*prefix, "ip", "link", "set", "lo", "up"], check=True)
        return lambda: 0, []

    def within(holder, words, **options):
        prefix = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"] if holder else []
        return subprocess.run(prefix + words.split(), check=True, capture_output=True, text=True, **options).stdout

    def dropped(holder):
        return sum(int(line.split("packets ")[1].split()[0]) for line in within(holder, "nft list table inet wall").splitlines() if "counter" in line)

    if network == "firewall":
        within(None, "nft -f -", input=WALL % "input")
        return lambda: dropped(None), []
    router, CONTAINER = namespace(), namespace()
    within(router, f"ip link add inside type veth peer name eth0 netns {CONTAINER.pid}")
    within(router, f"ip link add outside type veth peer name eth0 netns {os.getpid()}")
    for device, address in (("inside", "10.0.2.1"), ("outside", "10.0.1.1")):
        within(router, f"ip address add {address}/24 dev {device}")
        within(router, f"ip link set {device} up")
    within(router, "sysctl -qw net.ipv4.ip_forward=1")
    for holder, address, gateway in ((CONTAINER, "10.0.2.2", "10.0.2.1"), (None, "10.0.1.2", "10.0.1.1")):
        within(holder, f"ip address add {address}/24 dev eth0")
        within(holder, "ip link set eth0 up")
        within(holder, "ip link set lo up")
        within(holder, f"ip route add default via {gateway}")
    within(router, "nft -f -", input=ROUTER + WALL % "forward")
    return lambda: dropped(router), [router, CONTAINER]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="programs, separated by commas", type=lambda text: text.split(","))
    parser.add_argument("--modes", help="of native, run, flip, attach, full", type=lambda text: text.split(","), default=[*MODES, "full"])
    parser.add_argument("--seconds", type=float, default=4, help="length of each load")
    parser.add_argument("--network", choices=list(NETWORKS), default="plain", help="what is between the programs and this script")
    parser.add_argument("--all", action="store_true", help="fail if a program is not installed")
    parser.add_argument("--json", action="store_true", help="one object per line")
    given = parser.parse_args()
    unknown = [name for name in given.only or [] if name not in PROGRAMS] + [mode for mode in given.modes if mode not in (*MODES, *WIRE_MODES)]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is no such thing; programs are {', '.join(PROGRAMS)}")
    isolate(__file__, given.network)
    dropped, holders = build(given.network)
    if not given.json:
        print(f"{'program':<20} {'mode':<7} {'work':>7} {'conns':>6} {'moves':>6}  result")
    failed, missing = False, []
    for name in given.only or PROGRAMS:
        for mode in modes_of(name):
            if mode not in given.modes:
                continue
            before = dropped()
            try:
                row = trial_of(name, mode, given.seconds)
            except Missing as what:
                missing.append(f"{name} ({what})")
                break
            # A socket that an attached program has closed is removed with a reset, which the tracker may see before the egress program drops it.
            if mode in ("run", "flip") and dropped() > before:
                row["failures"].append(f"{dropped() - before} packets were invalid")
            failed |= bool(row["failures"])
            print(json.dumps(row), flush=True) if given.json else show(row)
    for holder in holders:
        holder.stdin.close()
        holder.wait()
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
    return 1 if failed or given.all and missing else 0


if __name__ == "__main__":
    sys.exit(main())

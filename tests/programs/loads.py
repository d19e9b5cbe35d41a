#!/usr/bin/env python3
"""Servers under the clients that people measure them with: wrk, ab, redis-benchmark, pgbench. Each as it is, under `baton run` without
a rule and with `--eager --rule accepted`, under `baton run --flip 5..50`, and under `baton attach --flip 5..50`.

A client may see no more errors than natively, no process may die, and no log may report a failure.

    tests/programs/loads.py                                  # everything that is installed here
    tests/programs/loads.py --only apache,gunicorn --modes native,accepted --seconds 1

It needs root, makes a network namespace of its own, and says which programs are missing. `--all` fails if any is.
"""

import argparse
import json
import os
import pwd
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs
from programs import BATON, HERE, Missing, Redis, check, free_port, tool

MODES = {"native": None, "default": [], "accepted": ["--eager", "--rule", "accepted"], "flip": ["--flip", "5..50"], "attach": None}
ADDRESS = "127.0.0.1"
# What servers log when one of their processes or threads has failed.
TROUBLE = re.compile(r"unexpected state|exit signal|Abort|Segmentation|Traceback|KeyError|panic|terminated by signal|worker died|Exception in")


class Load(programs.Trial):
    def under_baton(self, command, **options):
        prefix = []
        if self.mode in ("default", "accepted", "flip"):
            prefix = [BATON, "run", "--log", self.directory / "baton.log", "--flip-report", self.report, *MODES[self.mode], "--"]
        # lighttpd ends all of its process group.
        self.server = self.start(prefix + command, start_new_session=True, **options)
        return self.server

    def client(self, command):
        """Runs a client to its end and returns its output."""
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60 + 10 * self.seconds, cwd=self.directory)
        said = done.stdout + done.stderr
        check(done.returncode == 0, f"{command[0]} ended with {done.returncode}: {said[-400:]}")
        return said

    def wrk(self, port, path="/", connections=32):
        # A busy machine may need seconds to begin.
        seconds = max(5, round(self.seconds))
        said = self.client([tool("wrk"), "-t2", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", f"http://{ADDRESS}:{port}{path}"])
        errors = sum(int(count) for line in re.findall(r"Socket errors: (.*)", said) for count in re.findall(r"\d+", line))
        errors += sum(int(count) for count in re.findall(r"Non-2xx or 3xx responses: (\d+)", said))
        self.note(errors, int(re.search(r"(\d+) requests in", said)[1]), said)

    def ab(self, port, path="/"):
        # -k: persistent connections; -s: seconds that it waits for an answer.
        said = self.client([tool("ab"), "-k", "-c", 16, "-s", 20, "-t", max(1, round(self.seconds)), "-n", 100_000, f"http://{ADDRESS}:{port}{path}"])
        errors = sum(int(count) for count in re.findall(r"(?:Failed requests|Non-2xx responses|Write errors):\s+(\d+)", said))
        self.note(errors, int(re.search(r"Complete requests:\s+(\d+)", said)[1]), said)

    def note(self, errors, work, said):
        check(work > 0, f"nothing was done: {said[-400:]}")
        self.errors += errors
        self.work += work


def page(trial):
    """A directory with a page of 20 KB: the default rule (64 KiB) moves a connection at the fourth."""
    directory = trial.directory / "www"
    directory.mkdir()
    directory.chmod(0o755)
    (directory / "index.html").write_bytes(random.Random(1).randbytes(20_000))
    return directory


def started(trial, port):
    trial.await_port(port, ADDRESS)
    trial.attach(trial.server)


# ---- servers ---------------------------------------------------------------------------------------------------------------------


def redis_replica(trial):
    """A master, whose child sends the first copy; the replica is plain. What was written is compared."""
    ports = [free_port(), free_port()]
    common = [tool("redis-server"), "--bind", ADDRESS, "--save", "", "--dir", trial.directory, "--daemonize", "no"]
    trial.under_baton([*common, "--port", ports[0], "--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", 0])
    started(trial, ports[0])
    master = Redis(ports[0])
    chance, wrote = random.Random(1), {}

    def write(count):
        for _ in range(count):
            key, value = f"key{chance.randrange(200)}", chance.randbytes(chance.choice((3, 300, 30_000)))
            check(master.ask("SET", key, value) == b"+OK", "SET failed")
            wrote[key] = value

    # Nothing has moved yet when the child is forked.
    check(master.ask("SET", "first", "value") == b"+OK", "SET failed")
    wrote["first"] = b"value"
    trial.start([*common, "--port", ports[1], "--replicaof", ADDRESS, ports[0]])
    trial.await_port(ports[1], ADDRESS)
    replica = Redis(ports[1])
    trial.await_that(lambda: b"master_link_status:up" in replica.ask("INFO", "replication"), "the link")
    # The child that sent the copy has ended, or does so now: the master answers present and new clients.
    write(200)
    check(Redis(ports[0]).ask("PING") == b"+PONG", "a new connection is not answered")
    said = trial.client([tool("redis-benchmark"), "-h", ADDRESS, "-p", ports[0], "-t", "set,lpush", "-n", int(3000 * trial.seconds), "-c", 20, "-r", 50, "-d", 2000, "-q"])
    trial.note(len(re.findall("[Ee]rror", said)), int(6000 * trial.seconds), said)
    write(200)
    check(master.ask("WAIT", 1, 20_000) == b":1", "the replica does not acknowledge")
    for key, value in wrote.items():
        check(replica.ask("GET", key) == value, f"the replica has another {key}")
    check(master.ask("DBSIZE") == replica.ask("DBSIZE"), "the replica has another number of keys")


def apache(trial):
    """The event MPM: one thread waits and removes sockets from its set, others add them again. There are threads for all clients: an
    Apache whose threads are all busy closes persistent connections, and its clients count that as errors."""
    directory, port, modules = page(trial), free_port(), Path("/usr/lib/apache2/modules")
    if not (modules / "mod_mpm_event.so").exists():
        raise Missing("apache2")
    names = ("mpm_event", "authz_core", "dir", "mime", "unixd")
    loaded = "\n".join(f"LoadModule {name}_module {modules}/mod_{name}.so" for name in names if (modules / f"mod_{name}.so").exists())
    (trial.directory / "apache.conf").write_text(f"""
{loaded}
ServerName localhost
ServerRoot {trial.directory}
PidFile {trial.directory}/pid
Listen {ADDRESS}:{port}
User www-data
Group www-data
DocumentRoot {directory}
<Directory {directory}>
    Require all granted
</Directory>
DirectoryIndex index.html
TypesConfig /dev/null
ErrorLog {trial.directory}/messages
KeepAlive On
MaxKeepAliveRequests 0
ServerLimit 1
ThreadsPerChild 64
MaxRequestWorkers 64
""")
    trial.under_baton([tool("apache2"), "-f", trial.directory / "apache.conf", "-DFOREGROUND"])
    started(trial, port)
    trial.ab(port, "/index.html")
    trial.wrk(port)


WSGI = """
def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "20000")])
    return [b"g" * 20000]
"""

ASGI = """
async def application(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"20000")]})
    await send({"type": "http.response.body", "body": b"u" * 20000})
"""


def gunicorn(trial):
    """Threads share one set: a socket is removed when it is read, and added again when it is kept alive."""
    (trial.directory / "app.py").write_text(WSGI)
    port = free_port()
    trial.under_baton([tool("gunicorn"), "-k", "gthread", "--threads", 8, "-w", 1, "--keep-alive", 5, "-b", f"{ADDRESS}:{port}", "app:application"])
    started(trial, port)
    trial.wrk(port)
    trial.ab(port)


def uvicorn(trial):
    if subprocess.run(["/usr/bin/python3", "-c", "import uvicorn"], capture_output=True).returncode:
        raise Missing("uvicorn")
    (trial.directory / "app.py").write_text(ASGI)
    port = free_port()
    trial.under_baton(["/usr/bin/python3", "-m", "uvicorn", "--host", ADDRESS, "--port", port, "--log-level", "warning", "app:application"])
    started(trial, port)
    trial.wrk(port)


def lighttpd(trial):
    directory, port = page(trial), free_port()
    (trial.directory / "lighttpd.conf").write_text(f"""
server.document-root = "{directory}"
server.bind = "{ADDRESS}"
server.port = {port}
server.errorlog = "{trial.directory}/messages"
server.max-worker = 2
index-file.names = ( "index.html" )
""")
    trial.under_baton([tool("lighttpd"), "-D", "-f", trial.directory / "lighttpd.conf"])
    started(trial, port)
    trial.wrk(port)
    trial.ab(port, "/index.html")


CLUSTER = """
const cluster = require('cluster'), http = require('http');
if (cluster.isPrimary) {
    for (let n = 0; n < 2; n++) cluster.fork();
    cluster.on('exit', (worker, code, signal) => console.log('worker died', code, signal));
} else {
    const body = Buffer.alloc(20000, 'n');
    http.createServer((request, response) => response.end(body)).listen(+process.argv[2], process.argv[3]);
}
"""


def node_cluster(trial):
    (trial.directory / "cluster.js").write_text(CLUSTER)
    port = free_port()
    trial.under_baton([tool("node"), "cluster.js", port, ADDRESS])
    started(trial, port)
    trial.wrk(port)


def postgresql(trial):
    """A process for each connection, as an unprivileged user."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").exists() else []
    if not places:
        raise Missing("postgresql")
    port, user, data = free_port(), pwd.getpwnam("postgres"), trial.directory / "data"
    os.chown(trial.directory, user.pw_uid, user.pw_gid)
    plain = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    made = subprocess.run([places[-1] / "initdb", "-D", data, "-A", "trust", "--no-sync"], capture_output=True, cwd=trial.directory, **plain)
    check(made.returncode == 0, f"initdb: {made.stderr[-400:]}")
    # Starting Baton needs root; the server itself runs as an ordinary user.
    lower = ["/usr/bin/setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    options = ["-p", port, "-c", f"listen_addresses={ADDRESS}", "-c", "fsync=off", "-c", f"unix_socket_directories={trial.directory}"]
    trial.under_baton([*lower, places[-1] / "postgres", "-D", data, *options])
    ready = [places[-1] / "pg_isready", "-q", "-h", ADDRESS, "-p", str(port)]
    trial.await_that(lambda: subprocess.run(ready).returncode == 0, "PostgreSQL")
    trial.attach(trial.server)
    command = [places[-1] / "pgbench", "-h", ADDRESS, "-p", port, "-U", "postgres"]
    trial.client([*command, "-i", "-s", 1, "-q", "postgres"])
    said = trial.client([*command, "-c", 8, "-j", 2, "-T", max(1, round(trial.seconds)), "postgres"])
    trial.note(len(re.findall("aborted|FATAL|ERROR", said)), int(re.search(r"actually processed: (\d+)", said)[1]), said)
    said = trial.client([*command, "-c", 4, "-S", "-C", "-T", 1, "postgres"])
    trial.note(len(re.findall("aborted|FATAL|ERROR", said)), int(re.search(r"actually processed: (\d+)", said)[1]), said)


def java_threads(trial):
    """A thread for each request; the dispatcher removes sockets from its set and adds them again."""
    port = free_port()
    trial.under_baton([tool("java"), HERE / "Web.java", port])
    started(trial, port)
    trial.wrk(port)


PROGRAMS = {
    "redis replica": redis_replica,
    "apache": apache,
    "gunicorn": gunicorn,
    "uvicorn": uvicorn,
    "lighttpd": lighttpd,
    "node cluster": node_cluster,
    "postgresql": postgresql,
    "java threads": java_threads,
}


def trial_of(name, mode, seconds, allowed):
    """One row; `allowed`: errors that the client saw natively."""
    with tempfile.TemporaryDirectory(prefix="baton-loads-") as directory:
        os.chmod(directory, 0o755)
        trial = Load(name, mode, seconds, Path(directory))
        trial.errors, trial.server = 0, None
        row = {"program": name, "mode": mode, "failures": []}
        try:
            try:
                PROGRAMS[name](trial)
                check(trial.server.poll() is None, f"the server ended with {trial.server.returncode}")
                trouble = TROUBLE.search(messages(trial))
                check(not trouble, f"its log says {trouble and trouble[0]!r}")
            finally:
                trial.end()
            row |= {"work": trial.work, "client_errors": trial.errors} | trial.result()
            if trial.errors > allowed:
                row["failures"].append(f"{trial.errors} errors at the client, natively {allowed}")
            row["failures"] += [f"{row[what]} {what}" for what in ("resets", "errors") if row.get(what)]
            log = trial.directory / "baton.log"
            if log.exists() and log.stat().st_size:
                row["failures"].append(f"Baton says: {log.read_text(errors='replace')[-400:]}")
        except Missing:
            raise
        except Exception as failure:  # noqa: BLE001 - the table has it
            row["failures"] = [f"{type(failure).__name__}: {failure}", messages(trial)[-600:].strip()]
        return row


def messages(trial):
    path = trial.directory / "messages"
    return path.read_text(errors="replace") if path.exists() else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="programs, separated by commas", type=lambda text: text.split(","))
    parser.add_argument("--modes", help=f"of {', '.join(MODES)}", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--seconds", type=float, default=3, help="length of each load")
    parser.add_argument("--all", action="store_true", help="fail if a program is not installed")
    parser.add_argument("--json", action="store_true", help="one object per line")
    given = parser.parse_args()
    unknown = [name for name in given.only or [] if name not in PROGRAMS] + [mode for mode in given.modes if mode not in MODES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is no such thing; programs are {', '.join(PROGRAMS)}")
    programs.isolate(__file__)
    if not given.json:
        print(f"{'program':<20} {'mode':<8} {'work':>7} {'errors':>6} {'moves':>6}  result")
    failed, missing = False, []
    for name in given.only or PROGRAMS:
        allowed = 0
        for mode in given.modes:
            began = time.monotonic()
            try:
                row = trial_of(name, mode, given.seconds, allowed)
            except Missing as what:
                missing.append(f"{name} ({what})")
                break
            if mode == "native":
                allowed, row["failures"] = row.get("client_errors", 0), [why for why in row["failures"] if "at the client" not in why]
            failed |= bool(row["failures"])
            state = "; ".join(filter(None, row["failures"])) or f"ok  {time.monotonic() - began:.1f} s"
            given_back = ", ".join(f"{cause} {count}" for cause, count in row.get("given_back", {}).items())
            columns = f"{name:<20} {mode:<8} {row.get('work', 0):>7} {row.get('client_errors', ''):>6} {row.get('moves', ''):>6}"
            print(json.dumps(row) if given.json else f"{columns}  {state}  {given_back}", flush=True)
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
    return 1 if failed or given.all and missing else 0


if __name__ == "__main__":
    sys.exit(main())

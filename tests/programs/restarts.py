#!/usr/bin/env python3
"""nginx and redis under load while the Baton that moves their connections is repeatedly ended by SIGTERM and started: no request may fail.
Everything on loopback, in a network namespace of its own. Run as root. Usage: restarts.py [--rounds N] [--only nginx,redis]"""
import argparse, json, os, pathlib, shutil, signal, socket, subprocess, sys, tempfile, threading, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BATON = os.environ.get("BATON_PROGRAM", str(ROOT / "target/release/baton"))
BODY = os.urandom(4096)


class Differs(OSError):
    """Other bytes than were asked for."""


class Redis:
    name = "redis"

    def __init__(self, directory, port=6379):
        self.port = port
        self.command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(directory)]

    def request(self, connection, number):
        key, value = b"key%d" % (number % 100), b"value%d" % number
        connection.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(key), key, len(value), value))
        expect(connection, b"+OK\r\n")
        connection.sendall(b"*2\r\n$4\r\nECHO\r\n$%d\r\n%s\r\n" % (len(value), value))
        expect(connection, b"$%d\r\n%s\r\n" % (len(value), value))


class Nginx:
    name = "nginx"

    def __init__(self, directory, port=8080):
        self.port = port
        (directory / "body").write_bytes(BODY)
        directory.chmod(0o755)
        (directory / "nginx.conf").write_text(
            f"daemon off; pid {directory}/pid; error_log {directory}/errors; worker_processes 2;\n"
            "events {} http { access_log off; keepalive_requests 1000000000; keepalive_timeout 1h;\n"
            f"server {{ listen 127.0.0.1:{port}; root {directory}; }} }}\n")
        self.command = ["nginx", "-c", str(directory / "nginx.conf")]

    def request(self, connection, number):
        connection.sendall(b"GET /body HTTP/1.1\r\nHost: here\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += receive(connection, 1)
        if not head.startswith(b"HTTP/1.1 200"):
            raise Differs(f"not what was asked for: {head[:40]!r}")
        expect(connection, BODY)


def receive(connection, length):
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the connection has ended")
        data += piece
    return data


def expect(connection, wanted):
    if (got := receive(connection, len(wanted))) != wanted:
        raise Differs(f"{got[:40]!r} is not {wanted[:40]!r}")


KINDS = {kind.name: kind for kind in (Nginx, Redis)}


class Load(threading.Thread):
    """Requests one after the other, `pace` seconds apart: on one connection, or a new one every tenth time."""

    def __init__(self, server, renews, pace=0):
        super().__init__(daemon=True)
        self.server, self.renews, self.pace, self.done, self.failed, self.over = server, renews, pace, 0, [], False
        self.longest, self.begun, self.port, self.lock = 0, time.monotonic(), None, threading.Lock()
        self.start()

    def take_longest(self):
        """The longest request since the last time, that which is under way among them."""
        with self.lock:
            longest, self.longest = max(self.longest, time.monotonic() - self.begun), 0
        return longest

    def run(self):
        connection = None
        while not self.over:
            with self.lock:
                self.begun = time.monotonic()
            try:
                if connection is None or self.renews and self.done % 10 == 0:
                    connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
                    self.port = connection.getsockname()[1]
                self.server.request(connection, self.done)
                self.done += 1
            except OSError as error:
                self.failed.append(error)
                connection = None
            with self.lock:
                now = time.monotonic()
                self.longest, self.begun = max(self.longest, now - self.begun), now
            if self.pace:
                # Waits: the pace.
                time.sleep(self.pace)


def wait_for(what, holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {seconds} seconds")
        # Waits: between two looks.
        time.sleep(0.02)


def reachable(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def listed(door):
    said = subprocess.run([BATON, "ls", "--json", "--socket", door], capture_output=True, text=True)
    return json.loads(said.stdout) if said.returncode == 0 else []


def on_nic(door):
    return sum(one["place"] == "nic" for one in listed(door))


def run(kind, rounds):
    directory = pathlib.Path(tempfile.mkdtemp(prefix="baton-restarts-"))
    door = str(directory / "door/agent.sock")
    server = kind(directory)
    loads, program, up = [], None, None
    try:
        up = subprocess.Popen([BATON, "up", "--socket", door], stderr=subprocess.DEVNULL)
        wait_for("baton up", lambda: os.path.exists(door))
        command = [BATON, "run", "--socket", door, "--rule", "requests:2", "--", *server.command]
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=lambda: os.umask(0o022))
        wait_for(server.name, lambda: reachable(server.port))
        loads = [Load(server, renews) for renews in [False] * 6 + [True] * 2]
        for number in range(rounds):
            wait_for(f"connections on NIC {number + 1}", lambda: on_nic(door) >= 6)
            # Waits: the end comes at another moment of the moves each time, and at each the same must hold.
            time.sleep(0.05 * (number % 3))
            up.send_signal(signal.SIGTERM)
            if up.wait(20) != 0:
                raise SystemExit("baton up did not end well")
            done = sum(load.done for load in loads)
            wait_for("requests without Baton", lambda: sum(load.done for load in loads) > done + 50)
            up = subprocess.Popen([BATON, "up", "--socket", door], stderr=subprocess.DEVNULL)
        wait_for("connections on the last NIC", lambda: on_nic(door) >= 6)
        for load in loads:
            load.over = True
        for load in loads:
            load.join(15)
        failed = [error for load in loads for error in load.failed]
        longest = max(load.take_longest() for load in loads)
        print(f"{server.name}: {rounds} restarts, {sum(load.done for load in loads)} requests, {len(failed)} failed "
              f"{sorted(set(map(str, failed)))[:3] or ''}, the longest took {longest * 1000:.0f} ms")
        return not failed
    finally:
        for one in [program, up]:
            if one:
                one.terminate()
                one.wait(20)
        shutil.rmtree(directory, ignore_errors=True)


def go_inside():
    """Runs this program again in a network namespace of its own, if what it needs is there."""
    missing = [name for name in ("nginx", "redis-server") if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")]
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}; scripts/dependencies installs them")
    inside = 'mount -t tmpfs none /run; mount -t sysfs none /sys; ip link set lo up; exec "$@"'
    os.execvp("unshare", ["unshare", "-nm", "sh", "-c", inside, "sh", *map(str, [sys.executable, *sys.argv, "--inside"])])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="nginx,redis")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        go_inside()
    good = [run(KINDS[name], arguments.rounds) for name in arguments.only.split(",")]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

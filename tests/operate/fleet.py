#!/usr/bin/env python3
"""Runs the pods of the Kubernetes manifests by podman: the DaemonSet's and an application's, which opts in, through a replacement and a kill.

    make fleet                        builds the package (PROFILE=release by default), decodes the manifests, then this
    tests/operate/fleet.py DEB

The pods are those of fleet/kubernetes, as tests/fleet decodes them strictly. What differs from a cluster: the images are made here, the
node's /run/baton is a folder in target/operate, pods have no network but loopback, and podman's configuration stands for what a kubelet gives:
the node's PID namespace (podman before 4.4 does not read hostPID) and, to a privileged container, its control group namespace. A pod is
stopped as a kubelet does it: SIGTERM goes to a container's first process alone.
"""

import contextlib
import json
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

from container import base, step, wait_until
from web import Client

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "target/operate"
FLEET = ROOT / "fleet"
TOOLS = ["podman", "catatonit", "mmdebstrap", "nsenter", "go", "shellcheck", "promtool"]
IMAGES = {"baton": "localhost/baton:0.1.0", "application": "localhost/baton-application:1"}
# Longer than the slowest of these steps takes on a machine that is busy with other tests.
PATIENCE = 600
CONFIGURATION = """
[containers]
log_driver = "k8s-file"
pidns = "{processes}"
cgroupns = "{groups}"

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{folder}/tmp"
"""
SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Programs of this machine in a pod's network.
LISTENS = "import socket; socket.create_connection(('127.0.0.1', 80), 60).close()"
SCRAPE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics', timeout=60).read().decode())"


class Podman:
    """podman with storage and configuration of its own, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.command = ["podman", f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=vfs"]
        for kind, namespaces in {"node": ("host", "host"), "pod": ("private", "private")}.items():
            text = CONFIGURATION.format(processes=namespaces[0], groups=namespaces[1], folder=folder)
            (folder / f"{kind}.conf").write_text(text)

    def run(self, *arguments, kind="pod", check=True):
        """Runs a command of podman. Returns its status, what it printed, and its errors."""
        environment = {**os.environ, "CONTAINERS_CONF": f"{self.folder}/{kind}.conf"}
        command = [*self.command, *map(str, arguments)]
        # What it starts may keep these open, so they are files.
        text = {"mode": "w+", "errors": "replace"}
        with tempfile.TemporaryFile(**text) as output, tempfile.TemporaryFile(**text) as errors:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, timeout=PATIENCE)
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read())
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{said[0]}{said[1]}")
        return done.returncode, said[0], said[1]

    def says(self, *arguments):
        """What a command prints that succeeds."""
        return self.run(*arguments)[1].strip()

    def logs(self, container):
        """The end of what a container has printed, errors too."""
        _, output, errors = self.run("logs", "--tail=30", container, check=False)
        return output + errors

    def import_image(self, archive, name):
        self.run("import", f"--change=ENV PATH={SEARCH}", archive, name)

    def play(self, pod, kind="pod"):
        """Starts a pod, and returns when its init containers have ended and its containers have been started."""
        path = self.folder / f"{pod['metadata']['name']}.json"
        path.write_text(json.dumps(pod))
        self.run("kube", "play", "--network=none", path, kind=kind)

    def process(self, container):
        """The number of a container's first process on this machine."""
        return int(self.says("inspect", "--format={{.State.Pid}}", container))

    def end(self):
        # Connections go back to the kernel first; what does not end is killed.
        self.run("kill", "--signal=TERM", "baton-up", check=False)
        self.run("pod", "rm", "--all", "--force", "--time=60", check=False)
        for group in Path("/sys/fs/cgroup").glob("**/libpod_parent"):
            # Others may have pods of their own in it.
            with contextlib.suppress(OSError):
                group.rmdir()


class Inside:
    """A container, as the clients of web.py know one."""

    def __init__(self, podman, name):
        self.podman, self.name = podman, name

    def says(self, *command):
        return self.podman.says("exec", self.name, *command)

    def in_network(self, *command):
        return ["nsenter", f"--target={self.podman.process(self.name)}", "--net", *command]


def decoded(run):
    """The manifests' pods by name, on this machine: with images that are here, and a folder as the node's /run/baton."""
    command = ["go", "run", ".", FLEET / "kubernetes/baton.yaml", FLEET / "kubernetes/web.yaml"]
    pods = json.loads(subprocess.run(command, cwd=ROOT / "tests/fleet", stdout=subprocess.PIPE, check=True).stdout)
    for pod in pods:
        for volume in pod["spec"]["volumes"]:
            if volume.get("hostPath", {}).get("path") == "/run/baton":
                volume["hostPath"]["path"] = str(run)
        for one in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            if one["image"] != IMAGES["baton"]:
                one["image"], one["imagePullPolicy"] = IMAGES["application"], "IfNotPresent"
    return {pod["metadata"]["name"]: pod for pod in pods}


def checks():
    step("scripts and configuration: shellcheck, promtool")
    scripts = ["kubernetes/up", "kubernetes/opt-in", "mpi/openmpi", "mpi/mpich", "slurm/points"]
    scripts += ["slurm/openmpi.sbatch", "slurm/mpich.sbatch", "slurm/sweep.sbatch"]
    paths = [ROOT / "packaging/image", *(FLEET / script for script in scripts)]
    subprocess.run(["shellcheck", "--severity=warning", *paths], check=True)
    # Debian's Prometheus is built without Kubernetes' discovery: pods that are named take its place in a copy.
    config = (FLEET / "kubernetes/prometheus.yml").read_text()
    found = re.compile(r"( +)kubernetes_sd_configs:\n(?:\1 +.*\n)+")
    config, replaced = found.subn(r"\1static_configs: [{targets: [10.0.0.1:9464]}]\n", config)
    assert replaced == 1, config
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prometheus.yml"
        path.write_text(config)
        shutil.copy(FLEET / "kubernetes/alerts.yml", folder)
        subprocess.run(["promtool", "check", "config", path], stdout=subprocess.DEVNULL, check=True)


def images(podman, package):
    step("images of the distribution's packages: Baton's, and one with nginx and without Baton")
    archive = podman.folder / "baton.tar"
    subprocess.run([ROOT / "packaging/image", package, archive], check=True, stdout=subprocess.DEVNULL)
    podman.import_image(archive, IMAGES["baton"])
    archive.unlink()
    podman.import_image(base(FOLDER), IMAGES["application"])


@contextlib.contextmanager
def under_load(client):
    """A client that goes on with its requests on one connection, of which none may fail."""
    over, failed, answered = threading.Event(), [], []

    def load():
        try:
            while not over.is_set():
                answered.append(client.ask(1))
                # Waits: the load's pace: nginx closes a connection after a thousand requests.
                time.sleep(0.05)
        except (AssertionError, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert answered and not failed, failed


def place(node, port):
    """Where the server's connection with this peer's port is; None if it is not listed."""
    listed = json.loads(node.says("baton", "ls", "--json"))
    return next((one["place"] for one in listed if one["peer"].endswith(f":{port}")), None)


def wait_for_nic(node, client):
    wait_until("the connection is on the NIC", lambda: place(node, client.ask(2)) == "nic")


def serve(podman, pod):
    """Starts the application, and returns a handle when it listens."""
    podman.play(pod)
    web = Inside(podman, "web-nginx")
    listens = web.in_network(sys.executable, "-c", LISTENS)
    wait_until("nginx listens", lambda: subprocess.run(listens, stderr=subprocess.DEVNULL).returncode == 0)
    return web


def without_opting_in(podman, node, pod):
    step("without the annotation the application runs without Baton")
    other = json.loads(json.dumps(pod))
    del other["metadata"]["annotations"]
    web = serve(podman, other)
    client = Client(web)
    port = client.ask(20)
    assert place(node, port) is None
    client.end()
    assert "runs without Baton: none is up" in podman.logs("web-nginx"), podman.logs("web-nginx")
    podman.run("pod", "rm", "--force", "--time=10", "web")


def replace(podman, pod):
    podman.run("kill", "--signal=TERM", "baton-up")
    assert podman.says("wait", "baton-up") == "0", podman.logs("baton-up")
    podman.run("pod", "rm", "--force", "--time=10", "baton")
    podman.play(pod, kind="node")


def kill(podman):
    """Kills `baton up`, the child of the container's first process."""
    first = podman.process("baton-up")
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    (up,) = [int(child) for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "baton"]
    os.kill(up, signal.SIGKILL)
    wait_until("the container has been started again", lambda: podman.process("baton-up") not in (0, first))


def metrics(podman):
    step("metrics: the agents of all pods, at the port of the DaemonSet's pod")
    scrape = Inside(podman, "baton-metrics").in_network(sys.executable, "-c", SCRAPE)
    text = subprocess.run(scrape, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert re.search(r'^baton_up\{baton="/run/baton/agent\.sock\.\d+"\} 1$', text, re.MULTILINE), text
    carried = re.search(r'^baton_program_connections\{.*program="nginx".*place="nic".*\} (\d+)$', text, re.MULTILINE)
    carried = carried or re.search(r'^baton_program_connections\{.*place="nic".*program="nginx".*\} (\d+)$', text, re.MULTILINE)
    assert carried and int(carried[1]) >= 1, text


def pods(podman, run):
    node = Inside(podman, "baton-up")
    described = decoded(run)
    step("the DaemonSet's pod")
    podman.play(described["baton"], kind="node")
    print("  " + node.says("baton", "status", "--wait", "60").splitlines()[0])
    without_opting_in(podman, node, described["web"])
    step("with it, the application's connection goes to the NIC")
    web = serve(podman, described["web"])
    client = Client(web)
    wait_for_nic(node, client)
    # The agent finds the control groups of other pods' programs.
    groups = node.says("cat", f"/proc/{podman.process('web-nginx')}/cgroup")
    assert "/.." not in groups, groups
    metrics(podman)
    step("the pod is replaced under load, as a rolling restart does: no request fails, and the next Baton has the connection")
    with under_load(client):
        replace(podman, described["baton"])
        node.says("baton", "status", "--wait", "60")
    wait_for_nic(node, client)
    client.end()
    step("`baton up` is killed under load: the container ends when all is in the kernel, and is started again")
    client = Client(web)
    wait_for_nic(node, client)
    with under_load(client):
        kill(podman)
        node.says("baton", "status", "--wait", "60")
    wait_for_nic(node, client)
    client.end()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if os.geteuid() != 0:
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print("skipped: it needs root, to make containers")
        return
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not Path("/dev/net/tun").exists():
        assert "CI" not in os.environ, "nothing is skipped in CI"
        print(f"skipped: this machine lacks {', '.join(missing) or '/dev/net/tun'} (scripts/dependencies fleet)")
        return
    package = Path(sys.argv[1]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    checks()
    with tempfile.TemporaryDirectory(prefix="fleet-", dir=FOLDER) as folder:
        folder = Path(folder)
        (folder / "tmp").mkdir()
        (folder / "node").mkdir(mode=0o755)
        podman = Podman(folder)
        try:
            images(podman, package)
            pods(podman, folder / "node")
        except BaseException:
            for container in ("baton-up", "baton-metrics", "web-nginx"):
                print(f"{container}:\n{podman.logs(container)}", file=sys.stderr)
            raise
        finally:
            podman.end()
    print("all of it holds")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The test suites of network libraries and of redis, natively and while their connections are on the NIC and move.

    tests/programs/projects.py                      # all of them, under `--rule accepted --eager` and `--flip 1..50`
    tests/programs/projects.py tornado redis        # some
    tests/programs/projects.py trio --mode flip     # in one way

A test is lost if it fails under Baton twice and passes in each of three native runs; any that is lost fails the run. It needs root, and
fetches the suites once into target/projects: Python packages at the versions below, redis' sources from the distribution.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as tree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BATON = Path(os.environ.get("BATON_PROGRAM", ROOT / "target/release/baton"))
HOME = ROOT / "target/projects"
PYTHON = HOME / "python/bin/python"
PACKAGES = (
    "twisted==25.5.0 tornado==6.5.2 trio==0.31.0 gevent==25.9.1 uvloop==0.23.0 pytest==8.4.2 pytest-asyncio==1.2.0 trustme==1.2.1 "
    "pyOpenSSL==25.3.0 service-identity==24.2.0 aiohttp==3.13.0 psutil==7.1.0 setuptools==80.9.0 objgraph==3.6.2"
).split()
UVLOOP = "uvloop-0.23.0"
# Those that have to do with connections.
GEVENT = (
    "test__socket test__socket_close test__socket_errors test__socket_ex test__socket_timeout test__socket_send_memoryview test__server "
    "test__pywsgi test__server_pywsgi test__ssl test__socket_ssl test__select test__selectors test__monkey_select test__monkey_selectors"
).split()
UVLOOP_TESTS = "test_tcp.py test_sockets.py test_base.py test_regr1.py test_aiohttp.py test_dealloc.py test_pipes.py test_unix.py".split()
REDIS = (
    "unit/auth unit/protocol unit/keyspace unit/info unit/querybuf unit/multi unit/pubsub unit/limits unit/obuf-limits unit/maxmemory "
    "unit/networking unit/introspection unit/tracking unit/client-eviction unit/wait unit/shutdown unit/type/list unit/scripting unit/oom-score-adj "
    "integration/replication integration/replication-2 integration/replication-3 integration/replication-4 integration/replication-psync "
    "integration/psync2 integration/block-repl integration/redis-cli integration/redis-benchmark"
).split()
MODES = {"accepted": ["--rule", "accepted", "--eager"], "flip": ["--flip", "1..50"]}
# Seconds for which one command of a suite may run. After that it is killed, and the results that it has printed by then count.
LIMIT = 600
BAD = ("error", "failure", "skipped")


def pytest(*arguments, each=False):
    """A suite that pytest runs: its commands, each with its name for the file of results. `each`: a process for each argument."""
    common = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    groups = [[argument] for argument in arguments] if each else [list(arguments)]
    return lambda report: [[PYTHON, "-m", "pytest", *common, "--junit-xml", f"{report}.{number}.xml", *group] for number, group in enumerate(groups)]


def redis(_report):
    """A run for each unit, since an exception ends a whole run."""
    return [["tclsh", "tests/test_helper.tcl", "--clients", "1", "--single", unit] for unit in REDIS]


def site(package):
    code = f"import importlib.util as u; print(u.find_spec('{package}').submodule_search_locations[0])"
    return Path(subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def suites():
    gevent = [str(site("gevent") / "tests" / f"{name}.py") for name in GEVENT]
    uvloop = [str(HOME / UVLOOP / "tests" / name) for name in UVLOOP_TESTS]
    return {
        "tornado": (pytest("--pyargs", "tornado.test"), None),
        "twisted": (pytest("--pyargs", "twisted.internet", "twisted.test.test_tcp", "twisted.test.test_ssl", "twisted.web", "twisted.protocols"), None),
        "trio": (pytest("-p", "trio._tests.pytest_plugin", "--pyargs", "trio"), None),
        "gevent": (pytest(*gevent, each=True), None),
        "uvloop": (pytest(*uvloop, each=True), None),
        "redis": (redis, HOME / "redis"),
    }


def fetch():
    """Fetches what is not there yet."""
    if not PYTHON.exists():
        print("Fetching the Python packages", flush=True)
        subprocess.run([sys.executable, "-m", "venv", HOME / "python"], check=True)
        subprocess.run([HOME / "python/bin/pip", "install", "-q", *PACKAGES], check=True)
    if not (HOME / UVLOOP).exists():
        page = subprocess.run(["curl", "-sSf", "https://pypi.org/simple/uvloop/"], capture_output=True, text=True, check=True).stdout
        address = re.search(rf'href="([^"#]*{UVLOOP}\.tar\.gz)', page)[1]
        subprocess.run(f"curl -sSfL '{address}' | tar -xz -C '{HOME}'", shell=True, check=True)
    if not (HOME / "redis").exists():
        print("Fetching redis' sources", flush=True)
        fetch_redis()


def fetch_redis():
    """The sources of the installed redis, by a list of sources of its own; the programs are the installed ones."""
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        (directory / "lists/partial").mkdir(parents=True)
        release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())[1]
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (directory / "sources").write_text(f"deb-src [signed-by={keys}] http://deb.debian.org/debian {release} main\n")
        options = {"Dir::Etc::SourceList": directory / "sources", "Dir::Etc::SourceParts": "/nonexistent", "Dir::State::Lists": directory / "lists",
                   "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": "", "APT::Sandbox::User": "root"}
        apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        subprocess.run([*apt, "update"], cwd=directory, check=True)
        subprocess.run([*apt, "source", "--download-only", "redis"], cwd=directory, check=True)
        new = HOME / "redis.new"
        subprocess.run(["rm", "-rf", new], check=True)
        new.mkdir()
        archive = next(directory.glob("redis_*.orig.tar.*"))
        subprocess.run(["tar", "-xf", archive, "-C", new, "--strip-components=1"], check=True)
        for program in ("redis-server", "redis-cli", "redis-benchmark"):
            (new / "src" / program).symlink_to(Path("/usr/bin") / program)
        new.rename(HOME / "redis")


def of_pytest(reports):
    """Results by pytest's reports. A test that is skipped counts as one that fails: one that is skipped under Baton alone is lost."""
    found = {}
    for report in reports:
        try:
            root = tree.parse(report).getroot()
        except (OSError, tree.ParseError):
            continue
        for case in root.iter("testcase"):
            tags = {child.tag for child in case}
            text = "".join(child.text or "" for child in case if child.tag in BAD)
            found[f"{case.get('classname')}.{case.get('name')}"] = (not tags & set(BAD), text)
    return found


def of_redis(said):
    found, unit = {}, ""
    for line in said.splitlines():
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if line.startswith("Testing "):
            unit = line.split()[1]
        if match := re.match(r"\[(ok|err|exception)\]: (.*?)(?: \(\d+ ms\))?$", line):
            found[f"{unit}: {match[2]}"] = (match[1] == "ok", line)
    return found


def run(suite, mode):
    """Runs a suite. Returns for each test whether it passed, and what it says, and the seconds that it took."""
    commands, folder = suite
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-projects-") as directory:
        report = Path(directory) / "report"
        said = ""
        prefix = [BATON, "run", *MODES[mode], "--"] if mode else []
        for command in commands(report):
            said += run_command([*prefix, *command], folder or directory)
        if folder:
            found = of_redis(said)
        else:
            found = of_pytest(sorted(Path(directory).glob("report.*.xml")))
    if not found:
        print(said[-2000:], file=sys.stderr)
    return found, time.monotonic() - began


def run_command(command, folder):
    """Runs a command in a session of its own, of which nothing is left afterwards. Returns what it has printed."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"not over after {LIMIT} s: {' '.join(map(str, command))}", file=sys.stderr, flush=True)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        return output.read().decode(errors="replace")


def lost(suite, mode, native, ours):
    """The tests that fail again, and that pass in two more native runs."""
    nothing = (False, "it has not run, or not ended")
    suspects = [name for name, (passed, _) in native.items() if passed and not ours.get(name, nothing)[0]]
    if not suspects:
        return []
    again, _ = run(suite, mode)
    suspects = [name for name in suspects if not again.get(name, nothing)[0]]
    for _ in range(2):
        if suspects:
            once_more, _ = run(suite, None)
            suspects = [name for name in suspects if once_more.get(name, nothing)[0]]
    for name in suspects:
        print(f"{name}:\n{again.get(name, nothing)[1]}", file=sys.stderr, flush=True)
    return suspects


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("suites", nargs="*", metavar="SUITE", help="tornado, twisted, trio, gevent, uvloop or redis")
    arguments.add_argument("--mode", choices=MODES, help="one way only")
    arguments = arguments.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    fetch()
    known = suites()
    if unknown := [name for name in arguments.suites if name not in known]:
        sys.exit(f"no suite {unknown[0]}; there are {', '.join(known)}")
    failed = False
    for name in arguments.suites or known:
        native, seconds = run(known[name], None)
        passing = sum(passed for passed, _ in native.values())
        print(f"{name:<8} natively {len(native):>5} tests, {passing} pass  {seconds:.0f} s", flush=True)
        failed |= passing == 0
        for mode in [arguments.mode] if arguments.mode else MODES:
            ours, seconds = run(known[name], mode)
            gone = lost(known[name], mode, native, ours)
            failed |= bool(gone)
            passing = sum(passed for passed, _ in ours.values())
            print(f"{name:<8} {mode:<8} {len(ours):>5} tests, {passing} pass  {seconds:.0f} s  lost: {', '.join(gone) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

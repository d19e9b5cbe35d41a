#!/usr/bin/env python3
"""What `baton metrics` says, scraped by the distribution's Prometheus while connections move, NICs die and the Baton ends.

    make operate                      builds, installs Debian's prometheus, then this among others
    tests/operate/metrics.py BATON    a program that was built, with its library beside it

It runs in a network namespace of its own, with loopback only. promtool and PyPI's prometheus_client judge the formats; every expression of
packaging/metrics/dashboard.json and alerts.yml is evaluated by Prometheus over what it has scraped; baton_up falls when the Baton ends.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

from shared import PATIENCE, in_namespace, load, running, step, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGING = ROOT / "packaging/metrics"
PARSER = ROOT / "target/operate/python/bin/python"
PORTS = {"exporter": 19464, "prometheus": 19090}
# The NIC does not act on this option: the connection is refused.
REFUSED = """
def made(client, number):
    if number == 0:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1 << 20)
"""
# The reference parser of OpenMetrics, and what the text must say at least.
PARSE = """
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
families = {family.name: family for family in text_string_to_metric_families(sys.stdin.read())}
assert families["baton_move_blackout_seconds"].type == "histogram" and families["baton_move_blackout_seconds"].unit == "seconds"
assert families["baton_nic_sent_bytes"].type == "counter" and families["baton_up"].type == "gauge"
print(len(families))
"""


def ask(path, **query):
    url = f"http://127.0.0.1:{PORTS['prometheus']}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None


def values(expression):
    """The values of an expression now, by Prometheus."""
    answer = ask("query", query=expression)
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def dashboard_expressions():
    """As Grafana fills them in."""
    board = json.loads((PACKAGING / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$baton", ".*")


def check(baton):
    with tempfile.TemporaryDirectory(prefix="baton-operate-metrics-") as folder:
        folder = Path(folder)
        environment = {name: value for name, value in os.environ.items() if name != "BATON_SOCKET"}
        script = folder / "load.py"
        script.write_text(load(16, 20000, 0.01, REFUSED))
        # Its Baton's socket lies there, and no other one's.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**environment, "TMPDIR": str(folder)}}
        loads = [baton, "run", "--flip", "50..400", "--", sys.executable, script]
        with running(loads, **pipes) as server, contextlib.ExitStack() as stack:
            assert int(server.stdout.readline())
            (agent,) = folder.glob("baton-run-*/agent.sock")
            environment["BATON_SOCKET"] = str(agent)
            step("the text format: promtool check metrics")
            text = subprocess.run([baton, "metrics", "--once"], env=environment, stdout=subprocess.PIPE, check=True).stdout
            said = subprocess.run(["promtool", "check", "metrics"], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert said.returncode == 0 and not said.stdout.strip(), said.stdout.decode()
            step("OpenMetrics: PyPI's prometheus_client")
            command = [baton, "metrics", "--once", "--format", "openmetrics"]
            text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
            families = subprocess.run([PARSER, "-c", PARSE], input=text, stdout=subprocess.PIPE, check=True).stdout
            assert int(families) > 40, families
            step("promtool check config and rules")
            subprocess.run(["promtool", "check", "rules", PACKAGING / "alerts.yml"], stdout=subprocess.DEVNULL, check=True)
            subprocess.run(["promtool", "check", "config", PACKAGING / "prometheus.yml"], stdout=subprocess.DEVNULL, check=True)
            config = (PACKAGING / "prometheus.yml").read_text().replace("127.0.0.1:9464", f"127.0.0.1:{PORTS['exporter']}")
            config = "global: {scrape_interval: 1s, evaluation_interval: 1s}\n" + config
            (folder / "prometheus.yml").write_text(config)
            (folder / "alerts.yml").write_text((PACKAGING / "alerts.yml").read_text())
            exporter = [baton, "metrics", "--listen", f"127.0.0.1:{PORTS['exporter']}"]
            stack.enter_context(running(exporter, env=environment, stdout=subprocess.DEVNULL))
            prometheus = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
            prometheus += [f"--web.listen-address=127.0.0.1:{PORTS['prometheus']}", "--log.level=error"]
            stack.enter_context(running(prometheus))
            scraped(server, baton, environment)


def scraped(server, baton, environment):
    def ready():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORTS['prometheus']}/-/ready", timeout=PATIENCE) as answer:
                return answer.status == 200
        except OSError:
            return False  # It does not listen yet, or is not ready.

    wait_until("Prometheus is ready", ready)
    wait_until("Prometheus has scraped", lambda: values("sum(baton_up) == 1 and sum(up{job='baton'}) == 1"))
    target = ask("targets")["data"]["activeTargets"][0]
    step(f"scraped by Prometheus in {1000 * target['lastScrapeDuration']:.1f} ms")
    assert target["health"] == "up" and not target["lastError"], target
    wait_until("there are moves", lambda: values("sum(increase(baton_moves_total[1m])) > 20"))
    step("a NIC is killed")
    agents = json.loads(subprocess.run([baton, "nic", "show", "--json"], env=environment, stdout=subprocess.PIPE, check=True).stdout)
    os.kill(agents["nics"][0]["process"], signal.SIGKILL)
    wait_until("its death is counted", lambda: values('baton_nic_deaths_total{cause="killed"} == 1'))
    wait_until("the alert holds", lambda: values('ALERTS{alertname="BatonNicDies"}'))
    assert not values("resets(baton_nic_busy_seconds_total[5m]) > 0"), "a counter fell"
    count = 0
    for title, expression in dashboard_expressions():
        # A rate needs two values.
        wait_until(f"{title}: {expression}", lambda expression=expression: values(expression))
        count += 1
    step(f"every expression of the dashboard has values: {count}")
    rules = [rule for group in ask("rules")["data"]["groups"] for rule in group["rules"]]
    named = re.findall(r"- alert: (\w+)", (PACKAGING / "alerts.yml").read_text())
    assert [rule["name"] for rule in rules] == named, rules
    for rule in rules:
        assert rule["health"] == "ok" and not rule.get("lastError"), rule
        # What it compares is there.
        for side in re.split(r"\bor\b", rule["query"]):
            compared = re.sub(r"(>|==)\s*[\d.]+\s*$", "", side.strip())
            if compared != side.strip():
                wait_until(f"{rule['name']}: {compared}", lambda compared=compared: values(compared))
    step(f"every alert is evaluated: {len(rules)}")
    assert not values("baton_connections_lost_total > 0 or baton_moves_failed_total > 0")
    step("the Baton ends")
    server.stdin.close()
    assert server.wait(PATIENCE) == 0
    wait_until("it is down", lambda: values("baton_up == 0"))
    assert values("up{job='baton'} == 1"), "the exporter has ended"
    wait_until("the alert holds", lambda: values('ALERTS{alertname="BatonDown"}'))


in_namespace(check)

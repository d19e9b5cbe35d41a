#!/usr/bin/env python3
"""What `baton page` shows in the distribution's Chromium, while connections move and the agent dies.

    make operate                   builds, installs Debian's chromium, then this among others
    tests/operate/page.py BATON    a program that was built, with its library beside it

It runs in a network namespace of its own, with loopback only. At a phone's and a screen's width, dark and light: every connection is in
the page, nothing reaches beyond the screen's edge, nothing is loaded from elsewhere, nothing is refused by the page's own policy. The
keyboard reaches every control, and the accessibility tree has tables with headings. Screenshots are in target/operate.
"""

import base64
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import PATIENCE, in_namespace, load, running, step, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURES = ROOT / "target/operate"
WIDTHS = {"phone": (360, 740), "screen": (1280, 900)}
CLIENTS = 70
# The load's name is HTML.
NAMED = """
with open("/proc/self/comm", "w") as name:
    name.write("<b>&amp;</b>")
"""
# What Chromium is started by: it reads requests at descriptor 3 and writes answers to 4.
STARTS = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A tab of a headless Chromium, by the DevTools protocol over two pipes."""

    def __init__(self, folder, stack):
        ours, theirs = os.pipe(), os.pipe()
        self.requests, self.answers = ours[1], theirs[0]
        os.set_blocking(self.answers, False)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]
        command = [sys.executable, "-c", STARTS, ours[0], theirs[1], "chromium", *options, f"--user-data-dir={folder}/profile", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        stack.enter_context(running(command, pass_fds=(ours[0], theirs[1]), **quiet))
        os.close(ours[0]), os.close(theirs[1])
        self.bytes, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        # The page asks nothing while nobody looks, and keys go where the focus is.
        self.call("Page.bringToFront")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def message(self):
        until = time.monotonic() + PATIENCE
        while b"\0" not in self.bytes:
            left = until - time.monotonic()
            assert left > 0 and select.select([self.answers], [], [], left)[0], f"Chromium says nothing for {PATIENCE} s"
            piece = os.read(self.answers, 1 << 20)
            assert piece, "Chromium has ended"
            self.bytes += piece
        whole, _, self.bytes = self.bytes.partition(b"\0")
        return json.loads(whole)

    def call(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        left = json.dumps(request).encode() + b"\0"
        while left:
            left = left[os.write(self.requests, left) :]
        while True:
            message = self.message()
            if message.get("id") == self.number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def run(self, expression):
        """The value of an expression of JavaScript."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def press(self, key, code, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text if kind == "keyDown" else "")

    def picture(self, name):
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"])
        (PICTURES / f"page-{name}.png").write_bytes(data)
        assert len(data) > 10_000, f"{name}: an empty picture"

    def check_events(self, base):
        """Nothing was loaded from elsewhere, and there was no error."""
        for event in self.events:
            method, about = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                url = about["request"]["url"]
                assert url.startswith((base, "data:", "about:")), f"loaded from elsewhere: {url}"
            assert method != "Runtime.exceptionThrown", about
            if method == "Log.entryAdded" and about["entry"]["level"] == "error":
                # A filter that is none is answered so.
                assert "400" in about["entry"]["text"], about["entry"]
        self.events.clear()


ROWS = "document.querySelectorAll('#connections tbody tr').length"


def check_width(browser, name, width, height):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    seen = browser.run("[innerWidth, document.documentElement.scrollWidth]")
    assert seen[0] == width and seen[1] <= width, f"{name}: {seen[1]} wide on a screen of {seen[0]}"
    grounds = set()
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.add(browser.run("getComputedStyle(document.body).backgroundColor"))
        browser.picture(f"{name}-{scheme}")
    assert len(grounds) == 2, f"dark and light are the same: {grounds}"


def check_keyboard(browser):
    """Tab reaches every control, each with a visible mark."""
    browser.run("document.activeElement.blur()")
    reached = set()
    # Waits: a page has fewer controls than this, and each press goes on to the next one.
    for _ in range(40):
        browser.press("Tab", 9)
        now = browser.run(
            "(({id, className, tagName}, style) => [id || className || tagName, style.outlineStyle, parseFloat(style.outlineWidth)])"
            "(document.activeElement, getComputedStyle(document.activeElement))"
        )
        if now[0] == "BODY":
            break
        assert now[1] != "none" and now[2] >= 2, f"focus does not show: {now}"
        reached.add(now[0])
    missing = {"skip", "pause", "sort", "filter", "wide", "next"} - reached
    assert not missing, f"Tab does not reach {missing}, but {reached}"


def check_tree(browser):
    """What a screen reader finds."""
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    has = lambda node, role: not node["ignored"] and node["role"]["value"] == role
    of = lambda role: [node.get("name", {}).get("value", "") for node in nodes if has(node, role)]
    assert {"Local", "Peer", "Place", "Program", "CPU saved", "Busy"} <= set(of("columnheader")), of("columnheader")
    assert len(of("table")) == 3 and all(of("table")), of("table")
    assert len(of("rowheader")) > 50, of("rowheader")
    pictures = [name for role in ("img", "image") for name in of(role)]
    assert len(pictures) == 4 and all("Now:" in name for name in pictures), pictures
    for role in ("button", "combobox", "textbox"):
        assert of(role) and all(of(role)), (role, of(role))
    assert of("status"), "no live region"


def check(baton):
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="baton-operate-page-", ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as stack:
        folder = Path(folder)
        (folder / "load.py").write_text(load(CLIENTS, 5000, 0.05, NAMED))
        (folder / "bench.html").write_text("<!doctype html><title>Report</title><h1>Benches</h1><script>document.title = 'wrong'</script>")
        environment = {name: value for name, value in os.environ.items() if name != "BATON_SOCKET"}
        # Its Baton's socket lies there, and no other one's.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**environment, "TMPDIR": str(folder)}}
        loads = [baton, "run", "--flip", "50..400", "--", sys.executable, folder / "load.py"]
        server = stack.enter_context(running(loads, **pipes))
        assert int(server.stdout.readline())
        (agent,) = folder.glob("baton-run-*/agent.sock")
        environment["BATON_SOCKET"] = str(agent)
        serves = [baton, "page", "--listen", "127.0.0.1:0", "--report", folder / "bench.html"]
        page = stack.enter_context(running(serves, env=environment, stdout=subprocess.PIPE))
        base = re.fullmatch(rb"page at (http://127\.0\.0\.1:\d+/)\n", page.stdout.readline())[1].decode()
        browser = Browser(folder, stack)
        browser.call("Page.navigate", url=base)
        look(browser, base, baton, environment)
        step("the Baton ends")
        server.stdin.close()
        assert server.wait(PATIENCE) == 0
        wait_until("no Baton", lambda: "No Baton answers" in browser.run("document.getElementById('status').textContent"))
        step("the page's process ends")
        page.terminate()
        assert page.wait(PATIENCE) == 0
        wait_until("it is noticed", lambda: "does not answer" in browser.run("document.getElementById('status').textContent"))


def look(browser, base, baton, environment):
    wait_until("a page of connections", lambda: browser.run(ROWS) == 50)
    listed = subprocess.run([baton, "ls", "--json"], env=environment, stdout=subprocess.PIPE, check=True).stdout
    known = {(one["local"], one["peer"]) for one in json.loads(listed)}
    assert len(known) >= CLIENTS, len(known)
    wait_until("all connections", lambda: f"1 to 50 of {len(known)}" in browser.run("document.querySelector('#range').textContent"))
    step("all connections are there; a program's name is text")
    assert "<b>&amp;</b>/" in browser.run("document.querySelector('#connections tbody').textContent")
    assert browser.run("document.querySelectorAll('tbody b').length") == 0
    shown = browser.run("[...document.querySelectorAll('#connections tbody tr')].map((row) => [row.cells[0].textContent, row.cells[1].textContent])")
    assert len(shown) == 50 and {tuple(pair) for pair in shown} <= known, shown
    wait_until("plots", lambda: browser.run("document.querySelector('figure path.line0[d*=L]') !== null"))
    for name, (width, height) in WIDTHS.items():
        step(f"{name}: {width} pixels wide, dark and light")
        check_width(browser, name, width, height)
    step("keyboard and accessibility tree")
    check_keyboard(browser)
    check_tree(browser)
    step("pages, filters, pause")
    browser.run("document.getElementById('next').click()")
    wait_until("the next page", lambda: "51 to " in browser.run("document.querySelector('#range').textContent"))
    browser.run("document.getElementById('filter').focus()")
    browser.call("Input.insertText", text="colour = red")
    browser.press("Enter", 13, "\r")
    wait_until("the filter is refused", lambda: browser.run("document.getElementById('refused').textContent"))
    browser.run("document.getElementById('filter').value = ''")
    browser.call("Input.insertText", text="sport = :1")
    browser.press("Enter", 13, "\r")
    wait_until("the filter holds", lambda: browser.run(ROWS) == 0)
    browser.run("document.getElementById('filter').value = ''")
    browser.press("Enter", 13, "\r")
    wait_until("all again", lambda: browser.run(ROWS) == 50)
    browser.run("document.getElementById('pause').click()")
    wait_until("it pauses", lambda: browser.run("document.getElementById('status').textContent") == "Paused.")
    browser.run("document.getElementById('pause').click()")
    wait_until("it goes on", lambda: "up to date" in browser.run("document.getElementById('status').textContent"))
    step("the agent dies")
    state = "fetch('state').then((answer) => answer.json()).then((state) => state.batons.map((one) => one.agent))"
    (agent,) = browser.run(state)
    os.kill(agent, signal.SIGKILL)
    wait_until("it is announced", lambda: "was started anew" in browser.run("document.getElementById('status').textContent"))
    wait_until("all connections again", lambda: browser.run(ROWS) == 50)
    assert browser.run(state) != [agent]
    browser.check_events(base)
    step("the report of the last bench")
    assert "report" in browser.run("document.querySelector('#report a').href")
    assert browser.run("fetch('report').then((answer) => answer.text())").count("Benches") == 1


in_namespace(check)

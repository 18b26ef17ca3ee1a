"""The page in headless Chromium: curves, slider, zoom, axes, and updates while a real run trains. The console stays empty."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading

import pytest

from holdfast.cli import run
from holdfast.system.journal import Journal
from tests.report.browser import CHROMIUM, Browser
from tests.report.runs import record, write_run
from tests.train.test_start import prefix, training  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

# Pixels of the first canvas that have a colour of their own: curves, not text or grid.
COLOURED = """(() => {
  const canvas = document.querySelector("canvas");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 60) found++;
  return found;
})()"""
PICTURE = "document.querySelector('canvas').toDataURL()"
CONNECTION = "document.getElementById('connection').innerText"
LEGEND = "document.querySelector('.u-legend').innerText"


class Tunnel:
    """Forwards a port of its own to the server, as `ssh -L` does, and can lose its connections."""

    def __init__(self, target: int) -> None:
        self._target, self.port = target, 0
        self._sockets: list[socket.socket] = []
        self.listen()

    def listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def browser(tmp_path):
    found = Browser(tmp_path / "profile")
    yield found
    found.close()


def plot_box(browser):
    return browser.value(
        "(() => { const b = document.querySelector('.u-over').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
    )


def first_step(browser):
    """The step that the legend shows for the left end of the first chart."""
    left, top, _, height = plot_box(browser)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 1, y=top + height / 2)
    browser.wait_for(
        "document.querySelector('.u-legend .u-value').innerText !== '300'"
    )  # the newest step, without a pointer
    return float(browser.value("document.querySelector('.u-legend .u-value').innerText"))


def test_curves_slider_zoom_and_axes(browser, tmp_path):
    evil = "a<img src=x onerror=alert(1)>"
    for name in ("first", evil):
        folder = write_run(tmp_path / name)
        (folder / "metrics.jsonl").unlink()
        journal = Journal(folder / "metrics.jsonl")
        for step in range(1, 301):
            journal.write(
                record(step, time=1_790_000_000.0 + step, **({"validation_loss": 3.0} if step % 25 == 0 else {}))
            )
    page = tmp_path / "page.html"
    run(["report", str(tmp_path / "first"), str(tmp_path / evil), "--output", str(page)])
    browser.open(page.as_uri())
    assert browser.value("document.querySelectorAll('canvas').length") == 7 and browser.value(COLOURED) > 500
    assert browser.value("document.images.length") == 0 and evil in browser.value(LEGEND)

    assert browser.value("document.querySelector('.u-legend .u-value').innerText") == "300"
    before = browser.value(PICTURE)
    browser.value("(s => { s.value = 80; s.dispatchEvent(new Event('input')); })(document.forms[0].smoothing)")
    browser.wait_for(f"{PICTURE} !== {json.dumps(before)}")
    assert browser.value("document.forms[0].span.value") == "over 501 points"

    assert first_step(browser) == 1
    left, top, width, height = plot_box(browser)
    browser.drag((left + width / 2, top + height / 2), (left + width * 0.75, top + height / 2))
    browser.wait_for("!document.forms[0].reset.disabled")
    assert 140 <= first_step(browser) <= 160
    browser.value("document.forms[0].reset.click()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    browser.wait_for("document.querySelector('.u-legend .u-value').innerText === '300'")
    assert first_step(browser) == 1 and browser.value("document.forms[0].reset.disabled")

    for name, value in (("x", "consumed_tokens"), ("x", "time"), ("logx", True), ("logy", True)):
        before = browser.value(PICTURE)
        key = "checked" if value is True else "value"
        browser.value(
            f"(e => {{ e.{key} = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})(document.forms[0].{name})"
        )
        browser.wait_for(f"{PICTURE} !== {json.dumps(before)}")
        assert browser.value(COLOURED) > 500
    assert "wall time" in browser.value(LEGEND)
    # uPlot never returns if the range of a log scale has 0 in it: both flags change before the page draws again
    browser.value(
        "(f => { f.logx.checked = f.logy.checked = false; f.logx.dispatchEvent(new Event('change')); })(document.forms[0])"
    )

    drawn = browser.value(COLOURED)
    browser.value(
        "[...document.querySelectorAll('.u-legend .u-series th')].find(th => th.innerText.startsWith('a<')).click()"
    )
    browser.wait_for(f"{COLOURED} < {drawn}")
    assert browser.problems == []


def test_a_phone_in_the_dark_needs_no_sideways_scrolling_and_100000_steps_stay_smooth(browser, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    journal = Journal(folder / "metrics.jsonl")
    for step in range(1, 100_001):
        journal.write(record(step))
    run(["report", str(folder)])
    assert (folder / "report.html").stat().st_size < 3_000_000
    browser.open((folder / "report.html").as_uri(), width=390, height=800, dark=True)
    assert browser.value("document.documentElement.scrollWidth") == 390 and browser.value(COLOURED) > 300
    browser.value("document.forms[0].smoothing.dispatchEvent(new Event('input'))")
    assert browser.problems == []


def test_two_fingers_zoom_one_moves_and_a_double_tap_shows_everything(browser, tmp_path):
    run(["report", str(write_run(tmp_path / "run", iterations=200))])
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    browser.open((tmp_path / "run" / "report.html").as_uri(), width=390, height=2000)
    left, top, width, height = plot_box(browser)
    middle = top + height / 2

    def at(*shares: float) -> list[tuple[float, float]]:
        return [(left + width * share, middle) for share in shares]

    def left_end_is(low: int, high: int) -> None:
        """Waits until the legend shows a step of this range for the left end of the chart."""
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 1, y=middle)
        value = "document.querySelector('.u-legend .u-value').innerText"
        browser.wait_for(f"{value} >= {low} && {value} <= {high}")

    left_end_is(1, 1)
    browser.touch("touchStart", *at(0.4, 0.6))
    for spread in (0.3, 0.2, 0.1):
        browser.touch("touchMove", *at(spread, 1 - spread))
    browser.wait_for("!document.forms[0].reset.disabled")
    browser.touch("touchEnd")
    left_end_is(70, 80)  # 80% of the width show what 20% did: steps 75 to 125

    browser.touch("touchStart", *at(0.5))
    for place in (0.6, 0.7, 0.9):
        browser.touch("touchMove", *at(place))
    browser.touch("touchEnd")
    left_end_is(50, 60)

    for _ in range(2):
        browser.touch("touchStart", *at(0.5))
        browser.touch("touchEnd")
    browser.wait_for("document.forms[0].reset.disabled")
    left_end_is(1, 1)
    assert browser.problems == []


@pytest.mark.distributed
def test_the_page_follows_a_real_run_and_reconnects(browser, tmp_path, prefix):  # noqa: F811
    save = tmp_path / "live"
    with training(prefix, save, "--log-interval", "10"):
        command = [sys.executable, "-m", "holdfast.cli", "report", str(save), "--watch"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            port, path = re.fullmatch(r"http://127.0.0.1:(\d+)(/.*/)\n", server.stdout.readline()).groups()
            tunnel = Tunnel(int(port))
            browser.open(f"http://localhost:{tunnel.port}{path}")
            browser.wait_for(f"{CONNECTION} === 'live'")
            iteration = "+document.querySelector('.tile i').innerText.replace(/[^0-9]/g, '')"
            seen, before = browser.value(iteration), browser.value(PICTURE)
            browser.wait_for(f"{iteration} > {seen} && {PICTURE} !== {json.dumps(before)}")
            assert browser.problems == []
            tunnel.drop()
            browser.wait_for(f"{CONNECTION} === 'reconnecting'")
            tunnel.listen()
            browser.wait_for(f"{CONNECTION} === 'live'")
            seen = browser.value(iteration)
            browser.wait_for(f"{iteration} > {seen}")
            assert all("ERR_" in problem for problem in browser.problems), browser.problems  # the lost connection
            server.terminate()
            server.wait(30)
            browser.wait_for(f"{CONNECTION} === 'reconnecting'")
        finally:
            server.kill()
            server.wait(30)

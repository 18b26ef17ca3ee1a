"""Headless Chromium over its DevTools protocol: navigate, evaluate, type, click, screenshot."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser."""

    def __init__(self, socket) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=SECONDS))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.03)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=modifiers)

    def hover(self, selector: str) -> None:
        box = self.evaluate(f"(() => {{ const b = document.querySelector({selector!r}).getClientRects()[0];"
                            " return [b.left + b.width / 2, b.top + b.height / 2]; })()")  # fmt: skip
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def view(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(folder: Path):
    """A page of a browser of its own, with its profile in `folder`."""
    command = [
        chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--no-first-run",
    ]
    command += [f"--user-data-dir={folder}", "--disable-dev-shm-usage", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        file, deadline = folder / "DevToolsActivePort", time.monotonic() + SECONDS
        while not file.is_file() or "\n" not in file.read_text():
            assert time.monotonic() < deadline and process.poll() is None, "Chromium did not start"
            time.sleep(0.05)
        port = file.read_text().split("\n")[0]
        pages = httpx.get(f"http://127.0.0.1:{port}/json", timeout=SECONDS).json()
        (address,) = [page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"]
        with connect(address, max_size=1 << 26) as socket:
            page = Page(socket)
            page.call("Page.enable")
            yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Headless Chromium over its debugging pipe: opens a page, evaluates JavaScript in it, moves the mouse, takes pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 60.0


class Browser:
    """One tab. `problems` collects what the browser's console reports as an error, and exceptions of the page's script."""

    def __init__(self, profile: Path) -> None:
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        flags = f"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir={profile} --hide-scrollbars"
        command = f"exec {CHROMIUM} {flags} --remote-debugging-pipe --no-first-run about:blank 3<&{theirs} 4>&{answers}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(theirs, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(answers)
        self._number, self._buffer, self._session = 0, b"", None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer"
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:2000])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "warning"):
            self.problems.append(json.dumps(message["params"]["args"]))
        return message

    def open(self, address: str, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"the page never reached: {expression}"
            time.sleep(0.05)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        def mouse(kind: str, place: tuple[float, float], buttons: int) -> None:
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                buttons=buttons,
                clickCount=1,
            )

        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        mouse("mouseMoved", start, 0)
        mouse("mousePressed", start, 1)
        for place in (middle, end):
            mouse("mouseMoved", place, 1)
        mouse("mouseReleased", end, 0)

    def touch(self, kind: str, *places: tuple[float, float]) -> None:
        """Fingers on a touch screen: touchStart and touchMove with the place of each, touchEnd without one."""
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(places)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def picture(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)

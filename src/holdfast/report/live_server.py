"""`holdfast report --watch`: serves the page on 127.0.0.1 and sends it what changes, as server-sent events.

The invariants: the server listens on the loopback interface only, answers GET only, and changes nothing. The address contains a
random token, because other users of a login node reach its loopback interface too. A request whose Host header is not a loopback
name is refused: a web site that lets its name point to 127.0.0.1 (DNS rebinding) gets nothing.
"""

import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from holdfast.command_line.results import print_result
from holdfast.report.page import content_policy, page_content, render
from holdfast.report.run_record import RunRecord, read_run
from holdfast.report.sections import problem_list
from holdfast.system.desktop import open_in_browser
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

POLL_SECONDS, KEEP_ALIVE_SECONDS, RETRY_MS = 1.0, 15.0, 1000
MOST_STREAMS = 32
LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
WATCHED = (
    "metrics.jsonl",
    "events.jsonl",
    "config.toml",
    "checkpoints",
    "samples",
    "samples.jsonl",
    "rank_times.jsonl",
)


class WatchedRuns:
    """The content of the page, read again when a file of the run folders changes; readers wait for the next version."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._changed = threading.Condition()
        self._version, self._trouble = 0, ""
        self.closed = threading.Event()
        self._signature = self._files()
        self.runs: list[RunRecord] = [read_run(path) for path in paths]
        self._content = self._newest_read = page_content(self.runs)

    def _files(self) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for path in (folder / name for folder in self._paths for name in WATCHED):
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size))
            except OSError:
                found.append(None)
        return found

    def follow(self) -> None:
        """Returns when closed. Long runs take longer to read: at most a tenth of the time goes into reading."""
        cost = 0.0
        while not self.closed.wait(max(POLL_SECONDS, 9 * cost)):
            signature = self._files()
            if signature == self._signature and not self._trouble:
                continue
            start = time.monotonic()
            try:
                runs = [read_run(path) for path in self._paths]
                content = page_content(runs)
            except Exception as error:  # a folder was moved or removed, or a defect: this thread must not end
                self._show_trouble(error)
                continue
            cost = time.monotonic() - start
            self.runs, self._newest_read, self._signature, self._trouble = runs, content, signature, ""
            self._publish(content)

    def _show_trouble(self, error: Exception) -> None:
        """Shows why the page is not updated, once per cause, above the newest content that could be read."""
        cause = str(error) if isinstance(error, HoldfastError | OSError) else f"{type(error).__name__}: {error}"
        if cause == self._trouble:
            return
        self._trouble = cause
        text = f"this page is not updated: {cause}"
        log(f"warning: {text}")
        parts = self._newest_read["parts"]
        self._publish({**self._newest_read, "parts": {**parts, "top": problem_list([text]) + parts["top"]}})

    def _publish(self, content: dict[str, Any]) -> None:
        with self._changed:
            self._content = content
            self._version += 1
            self._changed.notify_all()

    def wait(self, version: int, seconds: float) -> tuple[int, dict[str, Any]]:
        """The newest version and its content, as soon as it is not `version`, at the latest after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version, self._content


def changes(content: dict[str, Any], sent: list[list[Any]]) -> dict[str, Any]:
    """The message for a page that has the rows `sent`: of each run, how many rows stay, and those that follow them."""
    runs = []
    for run, known in zip(content["runs"], sent, strict=True):
        rows, keep = run["rows"], 0
        while keep < min(len(rows), len(known)) and rows[keep] == known[keep]:
            keep += 1
        runs.append({"keep": keep, "rows": rows[keep:], "marks": run["marks"]})
    return {"parts": content["parts"], "charts": content["charts"], "runs": runs}


class PageServer(ThreadingHTTPServer):
    """Serves one page and its stream of changes, each request in a thread of its own."""

    daemon_threads = True

    def __init__(self, port: int, watched: WatchedRuns) -> None:
        self.watched = watched
        self.token = secrets.token_urlsafe(16)
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        super().__init__(("127.0.0.1", port), PageRequest)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        super().server_close()
        self.watched.closed.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a browser that closes its connection is no error."""


class PageRequest(BaseHTTPRequestHandler):
    """GET of the page or of its stream."""

    server: PageServer
    timeout = 30.0
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if name not in LOOPBACK_NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "the Host header is not a loopback name")
        elif self.path == f"/{self.server.token}/":
            page = render(self.server.watched.runs, live=True).encode()
            self._head("text/html; charset=utf-8", len(page))
            self.wfile.write(page)
        elif self.path == f"/{self.server.token}/events":
            self._stream()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _head(self, kind: str, length: int | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{content_policy(live=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        for key, value in headers.items():
            self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _stream(self) -> None:
        if not self.server.streams.acquire(blocking=False):
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        try:
            self._head("text/event-stream")
            self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
            version = -1
            sent: list[list[Any]] = [[] for _ in self.server.watched.runs]
            while not self.server.watched.closed.is_set():
                newest, content = self.server.watched.wait(version, KEEP_ALIVE_SECONDS)
                if newest == version:
                    self.wfile.write(b": no change\n\n")
                else:
                    message = orjson.dumps(changes(content, sent))
                    self.wfile.write(b"data: " + message + b"\n\n")
                version, sent = newest, [run["rows"] for run in content["runs"]]
        except OSError:
            return  # the page was closed; one that lost its connection asks again
        finally:
            self.server.streams.release()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: the terminal belongs to the user."""


def serve(paths: Sequence[Path], port: int, open_browser: bool, as_json: bool) -> None:
    """Serves until Ctrl-C."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: give 0 to 65535")
    watched = WatchedRuns(paths)
    try:
        server = PageServer(port, watched)
    except OSError as error:
        raise HoldfastError(f"cannot listen on port {port}: {error.strerror}; give another --port, or none") from error
    threading.Thread(target=watched.follow, daemon=True).start()
    print_result({"url": server.address}, server.address, as_json, indent=False)
    port = server.server_port
    log(f"the page follows the run until Ctrl-C; from another host: ssh -L {port}:127.0.0.1:{port} HOST")
    if open_browser:
        open_in_browser(server.address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        log("stopped")
    finally:
        server.server_close()

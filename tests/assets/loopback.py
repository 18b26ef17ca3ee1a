"""A real HTTP server on loopback that can fail on request, and records its requests and the bytes that it sent."""

import hashlib
import http.server
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0
    status: int = 0

    @property
    def start(self) -> int:
        """The first requested byte."""
        match = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(match[1]) if match else 0


@dataclass
class Page:
    """A file that the server has, and how it serves it. `script` holds what the next requests get instead, in order."""

    content: bytes
    etag: str | None = '"v1"'
    ranges: bool = True
    length: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    latency: float = 0.0
    block: int = 1 << 16
    block_delay: float = 0.0
    script: list[Callable[["Handler", "Page"], None]] = field(default_factory=list)


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Page] = {}
        self.requests: list[Request] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def put(self, path: str, content: bytes, **how) -> str:
        """Serves `content` at `path` and returns its URL."""
        self.pages[path] = Page(content, **how)
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def gets(self, path: str) -> list[Request]:
        return [one for one in self.requests if one.method in ("GET", "CONNECT") and one.path == path]

    def handle_error(self, request, client_address) -> None:
        """Clients that are killed in the middle are what this server is for."""

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.seen = Request(self.command, self.path, {key.lower(): value for key, value in self.headers.items()})
        self.server.requests.append(self.seen)
        page = self.server.pages.get(self.path)
        self.close_connection = True
        if page is None:
            self.answer(404)
            return
        time.sleep(page.latency)
        if page.script:
            page.script.pop(0)(self, page)
        else:
            self.serve(page)

    do_HEAD = do_GET
    do_CONNECT = do_GET

    def answer(self, status: int, **headers: str) -> None:
        self.seen.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()

    def serve(self, page: Page, stop_after: int | None = None) -> None:
        start = self.seen.start if page.ranges and self.seen.headers.get("if-range", page.etag) == page.etag else 0
        if start and start >= len(page.content):
            self.answer(416, Content_Range=f"bytes */{len(page.content)}")
            return
        self.seen.status = 206 if start else 200
        self.send_response(self.seen.status)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(page.content) - 1}/{len(page.content)}")
        if page.etag:
            self.send_header("ETag", page.etag)
        if page.length:
            self.send_header("Content-Length", str(len(page.content) - start))
        for key, value in page.headers.items():
            self.send_header(key, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(page.content) if stop_after is None else min(len(page.content), start + stop_after)
        for at in range(start, end, page.block):
            block = page.content[at : min(end, at + page.block)]
            self.wfile.write(block)
            self.seen.sent += len(block)
            time.sleep(page.block_delay)

    def reset(self) -> None:
        """Ends the connection with RST, not with FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def log_message(self, *_) -> None:
        pass


def fails(status: int, **headers: str) -> Callable[[Handler, Page], None]:
    return lambda handler, page: handler.answer(status, **headers)


def stops_after(count: int) -> Callable[[Handler, Page], None]:
    """Promises the whole file and hangs up early."""
    return lambda handler, page: handler.serve(page, stop_after=count)


def resets_after(count: int) -> Callable[[Handler, Page], None]:
    def behave(handler: Handler, page: Page) -> None:
        handler.serve(page, stop_after=count)
        handler.wfile.flush()
        time.sleep(0.05)  # a reset throws away what the client has not read yet
        handler.reset()

    return behave


def some_bytes(count: int, seed: int = 0) -> bytes:
    """Bytes in which no two blocks are alike, so that a seam in the wrong place is noticed."""
    blocks = (hashlib.sha256(f"{seed}-{at}".encode()).digest() for at in range(count // 32 + 1))
    return b"".join(blocks)[:count]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

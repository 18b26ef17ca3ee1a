"""Sixty-four ranks on four nodes ask for the same files at once: the source is asked once per cache."""

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.launch.conftest import Lab

NODES, TASKS = 4, 16
FILES = {f"/file-{number}": bytes([number]) * 300_000 for number in range(2)}
RANK = """
import hashlib, os, sys
from holdfast import fetch
base, *caches = sys.argv[1:]
for cache in caches:
    for name in ("file-0", "file-1"):
        path = fetch(f"{base}/{name}", cache_dir=cache.replace("NODE", os.environ["SLURM_NODEID"]))
        print(cache, name, hashlib.sha256(path.read_bytes()).hexdigest())
"""


@pytest.fixture
def server() -> Iterator[tuple[str, Counter[str]]]:
    """A web server that counts."""
    gets: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(b"")

        def do_GET(self) -> None:
            gets[self.path] += 1
            self.answer(FILES[self.path])

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILES[self.path])))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", gets
        listening.shutdown()
        thread.join()


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("cache", "gets_per_file"), [("shared", 1), pytest.param("local-NODE", NODES, marks=pytest.mark.slow)]
)
def test_each_cache_is_filled_once(
    lab: Lab, shared: Path, server: tuple[str, Counter[str]], cache: str, gets_per_file: int
) -> None:
    base, gets = server
    command = ["srun", f"--nodes={NODES}", f"--ntasks-per-node={TASKS}", sys.executable, "-c", RANK, base]
    done = lab.run(*command, shared / cache)
    expected = {(name, hashlib.sha256(FILES[f"/{name}"]).hexdigest()) for name in ("file-0", "file-1")}
    seen = Counter(tuple(line.split()[1:]) for line in done.stdout.splitlines())
    assert seen == dict.fromkeys(expected, NODES * TASKS)
    assert gets == dict.fromkeys(FILES, gets_per_file)

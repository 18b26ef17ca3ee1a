"""`holdfast fetch` on the command line: paths on stdout, words on stderr, exit codes that scripts can use."""

import json
import signal
import subprocess
import sys
import time

import pytest

from holdfast.assets.catalog import CATALOG
from tests.assets.loopback import sha256, some_bytes
from tests.assets.test_fetching import files_in

CONTENT = some_bytes(200_000)


def holdfast(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "holdfast.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_fetch_prints_the_path_of_every_file_and_nothing_else(server):
    urls = [server.put("/a.json", CONTENT), server.put("/b.json", CONTENT)]
    done = holdfast("fetch", *urls)
    assert done.returncode == 0 and done.stderr == ""
    assert [line.rpartition("/")[2] for line in done.stdout.splitlines()] == ["a.json", "b.json"]


def test_fetch_json_describes_the_result(server):
    url = server.put("/a.json", CONTENT)
    for downloaded in (True, False):
        (one,) = json.loads(holdfast("fetch", url, "--json", "--sha256", sha256(CONTENT)).stdout)
        path = one.pop("path")
        assert one == {"url": url, "size": len(CONTENT), "sha256": sha256(CONTENT), "downloaded": downloaded}
        assert path.endswith("/a.json")


def test_a_missing_url_is_one_line_and_exit_code_1(server, cache):
    done = holdfast("fetch", server.url("/missing.json"))
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr
        == f"holdfast: error: cannot fetch {server.url('/missing.json')}: the server answered 404 Not Found\n"
    )
    assert files_in(cache) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["fetch"],
        ["fetch", "--no-such-flag", "gpt2"],
        ["fetch", "no-such-name"],
        ["fetch", "gpt2/no-such-file"],
        ["fetch", "gpt2", "--sha256", "0" * 64],
        ["fetch", "http://127.0.0.1:1/x", "--sha256", "abc"],
        ["fetch", "http://127.0.0.1:1/x", "--timeout", "soon"],
        ["fetch", "gopher://x/y"],
        ["fetch-storm", "--ranks", "0"],
        ["fetch-storm", "--strategy", "hope"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, cache):
    done = holdfast(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and done.stderr and "Traceback" not in done.stderr
    assert not cache.exists()


@pytest.mark.parametrize("verb", ["fetch", "fetch-storm"])
def test_help_has_examples(verb):
    shown = holdfast(verb, "--help").stdout
    assert shown.count(f"  holdfast {verb} ") >= 2


def test_the_list_shows_every_name_with_its_urls():
    shown = holdfast("fetch", "--list").stdout
    for name, known in CATALOG.items():
        assert f"\n{name}: " in f"\n{shown}"
        assert all(url in shown for one in known.files.values() for url in (one.url, *one.mirrors))
    assert set(json.loads(holdfast("fetch", "--list", "--json").stdout)) == set(CATALOG)


def test_offline_flag_fails_without_asking_anybody(server, cache):
    done = holdfast("fetch", server.put("/a.json", CONTENT), "--offline")
    assert done.returncode == 1 and f"looked in {cache}" in done.stderr and server.requests == []


def test_interrupted_leaves_no_final_name_and_the_next_call_continues(server, cache):
    url = server.put("/a.json", CONTENT, block=2_000, block_delay=0.05)
    process = subprocess.Popen([sys.executable, "-m", "holdfast.cli", "fetch", url], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 240
    while not any(part.stat().st_size for part in cache.rglob("*.part")):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=240)[1] and process.returncode == 130
    assert files_in(cache) == []
    server.pages["/a.json"].block_delay = 0
    assert holdfast("fetch", url).returncode == 0
    assert server.gets("/a.json")[1].start > 0

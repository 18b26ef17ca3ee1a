"""`holdfast serve` as a user starts and ends it: addresses, keys, signals, a missing extra."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from holdfast.cli import run
from holdfast.system.errors import HoldfastError, UsageError
from tests.serve.conftest import start


def test_an_address_that_others_reach_needs_a_key(gpt2_folder, monkeypatch):
    monkeypatch.delenv("HOLDFAST_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.0.2.7", "example.invalid"):
        with pytest.raises(UsageError, match=r"HOLDFAST_API_KEY .* --without-api-key"):
            run(["serve", str(gpt2_folder), "--host", host])
    with pytest.raises(UsageError, match="is empty"):
        run(["serve", str(gpt2_folder), "--api-key", " "])


def test_wrong_use_is_named(gpt2_folder, tmp_path):
    for arguments, message in [
        (["--port", "70000"], "--port 70000: give 0 to 65535"),
        (["--slots", "0"], "--slots 0: give 1"),
        (["--max-queue", "-1"], "--max-queue -1"),
        (["--request-timeout", "0"], "--request-timeout 0"),
        (["--host", "no.such.host.invalid", "--without-api-key"], "--host no.such.host.invalid"),
        (["--host", "a" * 64 + ".invalid", "--without-api-key"], "--host aaa"),
        ([str(gpt2_folder), str(gpt2_folder)], "one or two models"),
    ]:
        with pytest.raises(UsageError, match=message):
            run(["serve", str(gpt2_folder), *arguments])
    with pytest.raises(HoldfastError, match="missing: no such file"):
        run(["serve", str(tmp_path / "missing"), "--port", "0"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HoldfastError, match=f"cannot listen on 127.0.0.1, port {port}: .*another --port"):
            run(["serve", str(gpt2_folder), "--port", str(port)])


def test_without_the_extra_the_verb_names_it_and_the_others_work(gpt2_folder, tmp_path):
    """A process in which starlette cannot be imported."""
    (tmp_path / "starlette.py").write_text("raise ImportError(name='starlette')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "holdfast"]
    done = subprocess.run(
        [*command, "serve", str(gpt2_folder), "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "pip install 'holdfast[serve]'" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([*command, "serve", "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--api-key" in done.stdout


def test_a_key_is_needed_and_sigterm_lets_running_texts_end(gpt2_folder):
    server = start(str(gpt2_folder), "--slots", "2", "--host", "0.0.0.0", HOLDFAST_API_KEY="s3cret")
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    body = {"prompt": "the quick", "max_tokens": 1500, "temperature": 0, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").status_code == client.get("/").status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "s3cret"},
        ):
            for answer in (client.get("/v1/models", headers=headers), client.get("/metrics", headers=headers)):
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer s3cret"}
        assert "s3cret" not in " ".join(server.process.args)
        with client.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and '"finish_reason":"length"' in rest[-4]
    assert server.process.wait(60) == 0
    loading, serving, stopped = server.log().splitlines()
    assert loading.startswith("loading ") and "playground at http://0.0.0.0:" in serving and "stopped" in stopped
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@pytest.mark.slow
def test_a_drain_that_takes_too_long_is_cut_off(gpt2_folder):
    """SIGTERM with 200 texts of 2,000 tokens in the queue: the server ends after its limit, not after the texts."""
    server = start(str(gpt2_folder), "--slots", "1", "--drain-timeout", "1")
    body = {"prompt": ["the quick"] * 2, "n": 60, "max_tokens": 2000, "temperature": 0, "stream": True}
    begun = threading.Event()

    def ask():
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for _ in answer.iter_lines():
                begun.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert begun.wait(60)
    assert server.end() == 0
    thread.join(60)

"""`report --watch`: the page follows a growing run, also after the connection is lost, and answers this machine only."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.report import live_server
from holdfast.report.live_server import PageServer, WatchedRuns, changes
from holdfast.report.page import page_content
from holdfast.report.run_record import read_run
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from tests.report.runs import record, write_run


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(live_server, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(live_server, "KEEP_ALIVE_SECONDS", 0.2)
    watched = WatchedRuns([write_run(tmp_path / "run")])
    found = PageServer(0, watched)
    for target in (watched.follow, found.serve_forever):
        threading.Thread(target=target, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    return connection.getresponse()


def message(stream):
    """The next message of the stream. Lines without data keep the connection alive."""
    while not (line := stream.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line[6:])


def test_the_page_is_served_to_who_knows_its_address_on_this_machine(server):
    path = f"/{server.token}/"
    page = get(server, path)
    assert page.status == 200 and "connect-src 'self'" in page.headers["Content-Security-Policy"]
    assert b'data-live="events"' in page.read()
    for host in ("localhost:9000", "127.0.0.1", "[::1]:80"):  # a tunnel may have another port
        assert get(server, path, host).status == 200
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""):
        assert get(server, path, host or " ").status == 403
    for wrong in ("/", "/favicon.ico", "/events", f"/{server.token}/../x", f"/{server.token[:-1]}/"):
        assert get(server, wrong).status == 404


def test_a_page_gets_all_rows_and_then_only_new_ones(server, tmp_path):
    stream = get(server, f"/{server.token}/events")
    first = message(stream)
    assert (
        first["runs"][0]["keep"] == 0 and len(first["runs"][0]["rows"]) == 200 and "finished" in first["parts"]["top"]
    )
    journal = Journal(tmp_path / "run" / "metrics.jsonl")
    journal.write(record(201))
    second = message(stream)
    assert (second["runs"][0]["keep"], len(second["runs"][0]["rows"])) == (200, 1)
    journal.write(record(150))  # a resume: what was logged after it goes
    third = message(stream)
    assert (third["runs"][0]["keep"], len(third["runs"][0]["rows"])) == (149, 1)
    again = message(get(server, f"/{server.token}/events"))
    assert again["runs"][0]["keep"] == 0 and len(again["runs"][0]["rows"]) == 150


def test_streams_are_limited_and_a_closed_page_makes_room(server):
    server.streams = threading.BoundedSemaphore(1)
    first = get(server, f"/{server.token}/events")
    message(first)
    assert get(server, f"/{server.token}/events").status == 503
    first.close()
    deadline = time.monotonic() + 30
    while get(server, f"/{server.token}/events").status == 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_that_disappears_is_named_and_the_page_keeps_what_it_shows(server, tmp_path):
    stream = get(server, f"/{server.token}/events")
    whole = message(stream)["parts"]["top"]
    (tmp_path / "run").rename(tmp_path / "moved")
    while "there is no run folder" not in (top := message(stream)["parts"]["top"]):
        pass
    assert top.startswith('<ul class="problems') and top.endswith(whole)
    (tmp_path / "moved").rename(tmp_path / "run")
    assert message(stream)["parts"]["top"] == whole
    Journal(tmp_path / "run" / "metrics.jsonl").write(record(201))
    while not (rows := message(stream)["runs"][0]["rows"]):  # the rename alone changes no rows
        pass
    assert rows[0][0] == 201


def test_an_error_while_the_page_is_drawn_does_not_end_the_updates(server, tmp_path, monkeypatch):
    stream = get(server, f"/{server.token}/events")
    message(stream)

    def fail(runs):
        raise ValueError("a <defect>")

    with monkeypatch.context() as broken:
        broken.setattr(live_server, "page_content", fail)
        journal = Journal(tmp_path / "run" / "metrics.jsonl")
        journal.write(record(201))
        assert "this page is not updated: ValueError: a &lt;defect&gt;" in message(stream)["parts"]["top"]
    assert len(message(stream)["runs"][0]["rows"]) == 1


def test_a_message_has_the_rows_that_the_page_lacks(tmp_path):
    content = page_content([read_run(write_run(tmp_path / "run"))])
    rows = content["runs"][0]["rows"]
    assert changes(content, [rows])["runs"][0] == {"keep": 200, "rows": [], "marks": content["runs"][0]["marks"]}
    assert changes(content, [[*rows[:10], [0]]])["runs"][0]["keep"] == 10


def test_the_command_prints_the_address_and_ends_cleanly_at_ctrl_c(tmp_path):
    run = write_run(tmp_path / "run")
    command = [sys.executable, "-m", "holdfast.cli", "report", str(run), "--watch", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = json.loads(process.stdout.readline())["url"]
        host, path = address.removeprefix("http://").split("/", 1)
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("GET", f"/{path}events")
        message(connection.getresponse())
        taken = subprocess.run([*command, "--port", host.split(":")[1]], capture_output=True, text=True, timeout=60)
        assert taken.returncode == 1 and "Address already in use; give another --port" in taken.stderr
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "") and error.splitlines()[-1] == "stopped" and "Traceback" not in error
    assert sorted(os.listdir(run)) == ["checkpoints", "config.toml", "events.jsonl", "metrics.jsonl"]


def test_a_missing_run_is_reported_before_the_server_starts(tmp_path):
    with pytest.raises(HoldfastError, match="there is no run folder"):
        WatchedRuns([tmp_path / "nowhere"])
    run = write_run(tmp_path / "run")
    with pytest.raises(HoldfastError, match=f"is not a run folder.*; run folders in it: {run}$"):
        WatchedRuns([tmp_path])

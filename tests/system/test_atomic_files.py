"""Atomic publish and the journal: what a crash, a full disk or a second writer can and cannot do."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from holdfast.system.atomic_files import publish_bytes, publish_file, publish_folder, publish_text, temporary_beside
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal, Journal, read_journal
from tests.disks import small_disk


def test_a_failed_writer_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    publish_text(path, "old")
    with pytest.raises(RuntimeError), publish_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_appears_whole_or_not_at_all_and_replaces_nothing(tmp_path):
    with pytest.raises(RuntimeError), publish_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with publish_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
    assert (tmp_path / "out" / "a").read_text() == "a"
    with pytest.raises(HoldfastError, match="already exists"), publish_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "a").read_text() == "a"


WRITER = """
import sys, time
from pathlib import Path
from holdfast.system.atomic_files import publish_folder
with publish_folder(sys.argv[1]) as temporary:
    (temporary / "half").write_text("half")
    print("written", flush=True)
    time.sleep(600)
"""


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "out")], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout.readline() == b"written\n"
    killed, living = writers
    killed.kill()
    killed.wait()
    own, other = temporary_beside(tmp_path / "out"), tmp_path / ".out.tmp"
    elsewhere = tmp_path / f".out.{'0' * 16}-{killed.pid}-1-89abcdef.tmp"  # of another machine: nothing proves it dead
    for path in (own, other, elsewhere):
        path.mkdir()
    with publish_folder(tmp_path / "out") as temporary:
        left = {path.name for path in tmp_path.iterdir()} - {path.name for path in (own, other, elsewhere, temporary)}
        assert len(left) == 1 and f"-{living.pid}-" in left.pop()
    living.kill()
    living.wait()
    for writer in writers:
        writer.stdout.close()


def test_a_full_disk_is_a_clear_error(tmp_path):
    with small_disk(tmp_path / "small", "64k") as disk:
        with pytest.raises(HoldfastError, match="no room left"):
            publish_bytes(disk / "file", b"x" * 1_000_000)
        assert os.listdir(disk) == []


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((HoldfastError, OSError), match="file"):
        publish_text(tmp_path / "file" / "inside", "x")


def test_a_killed_writer_costs_the_journal_at_most_its_last_line(tmp_path):
    path = tmp_path / "events.jsonl"
    code = textwrap.dedent(f"""
        from holdfast.system.journal import Journal
        journal = Journal({str(path)!r})
        number = 0
        while True:
            journal.write({{"number": number, "filler": "x" * 500}})
            number += 1
            if number == 50: print("ready", flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    numbers = [record["number"] for record in read_journal(path)]
    assert len(numbers) >= 50 and numbers == list(range(len(numbers)))


def test_a_torn_line_is_closed_off_and_passed_over(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":')
    journal = Journal(path)
    journal.event("started", world=2)
    journal.close()
    assert [set(record) for record in read_journal(path)] == [{"a"}, {"time", "event", "world"}]
    assert list(read_journal(tmp_path / "missing")) == []


def test_a_buffered_journal_survives_a_full_disk_and_loses_no_record(tmp_path):
    with small_disk(tmp_path / "small", "64k") as disk:
        (disk / "filler").write_bytes(bytes(40_000))
        journal = BufferedJournal(disk / "events.jsonl")
        for number in range(400):
            journal.event("tick", number=number, padding="x" * 100)
        assert len(list(read_journal(journal.path))) < 400, "the disk was to become full"
        subprocess.run(["mount", "-o", "remount,size=256k", disk], check=True)
        journal.close()
        assert [record["number"] for record in read_journal(journal.path)] == list(range(400))

"""A journal of a process that must go on: records wait in memory while its file cannot be written."""

import resource
import signal

from holdfast.system.journal import BufferedJournal, read_journal


def test_records_wait_in_memory_while_the_file_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "events.jsonl"
    journal = BufferedJournal(path)
    journal.event("started")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
        journal.event("failure")
        journal.event("resumed")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [record["event"] for record in read_journal(path)] == ["started"]
        journal.event("finished")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [record["event"] for record in read_journal(path)] == ["started", "failure", "resumed", "finished"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: cannot write {path}: File too large; records are kept in memory until it can be written"

"""A journal of a process that must go on: records wait in memory while its file cannot be written."""

import resource
import signal
import sys
import threading

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


def test_threads_that_write_at_the_same_time_write_each_record_once(tmp_path):
    journal = BufferedJournal(tmp_path / "events.jsonl")
    errors: list[BaseException] = []
    together = threading.Barrier(4)

    def write(thread: int) -> None:
        together.wait()
        try:
            for number in range(2000):
                journal.write({"thread": thread, "number": number})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    records = [(record["thread"], record["number"]) for record in read_journal(tmp_path / "events.jsonl")]
    assert sorted(records) == [(thread, number) for thread in range(4) for number in range(2000)]

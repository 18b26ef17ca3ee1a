"""Every tracker gets every iteration once, from its own library, offline, also when ranks are killed on the way."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections import Counter

import pytest

from holdfast.cli import run
from holdfast.config import Config, LogConfig
from holdfast.system.errors import UsageError
from holdfast.system.journal import read_journal
from holdfast.train.trackers.process import start_trackers
from holdfast.train.trackers.prometheus import PrometheusSink
from tests.corpus import write_dataset
from tests.distributed.test_kill import command, ranks_of, wait_for_step

pytestmark = pytest.mark.distributed
STEPS = 60


def leveldb_records(data):
    """The records of a log file in LevelDB's format, behind W&B's header of seven bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # the rest of a block is padding
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_steps(folder):
    """The steps in W&B's own log files."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                found.append(record.history.step.num)
    return found


def mlflow_steps(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"file:{folder}/mlruns")
    [experiment] = [found for found in client.search_experiments() if found.name == "tiny"]
    [only] = client.search_runs([experiment.experiment_id])
    assert only.info.status == "FINISHED" and only.data.params["num_layers"] == "2"
    return [metric.step for metric in client.get_metric_history(only.info.run_id, "loss")]


def trackio_steps():
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps([row['step'] for row in S.get_logs('tiny', 'run')]))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return json.loads(found.stdout)


@pytest.mark.slow
def test_trackers_hold_each_iteration_once_after_two_kills(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    save, prefix = tmp_path / "run", write_dataset(tmp_path / "corpus")
    flags = (
        f"--wandb-project tiny --mlflow-experiment tiny --mlflow-tracking-uri file:{tmp_path}/mlruns "
        "--trackio-project tiny --metrics-port 0 --max-restarts 5"
    ).split()
    process = subprocess.Popen(
        command(prefix, save, STEPS, *flags), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for step in (12, 30):
        wait_for_step(save, step, process)
        for rank in ranks_of(save):
            os.kill(rank, signal.SIGKILL)
    assert process.wait(200) == 0, process.communicate()[1]
    iterations = Counter(record["iteration"] for record in read_journal(save / "metrics.jsonl"))
    assert set(iterations) == set(range(1, STEPS + 1))
    log = (save / "logs" / "trackers.log").read_text()
    for steps in (wandb_steps(save), mlflow_steps(tmp_path), trackio_steps()):
        assert Counter(steps) == Counter(range(1, STEPS + 1)), log
    assert re.search(r"metrics for Prometheus at http://127\.0\.0\.1:\d+/metrics", log)


def test_metrics_are_served_for_prometheus(tmp_path):
    save = tmp_path / 'r"un'
    (save / "trackers").mkdir(parents=True)
    (save / "config.toml").write_text("[log]\nmetrics_port = 0\n")
    (save / "metrics.jsonl").write_text('{"iteration": 3, "loss": 2.5, "mfu": null}\n{"iteration": 4, "lo')
    follower = subprocess.Popen(
        [sys.executable, "-m", "holdfast.train.trackers.follower", str(save)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert follower.stdout and follower.stdin
    address = follower.stdout.readline().split()[-1]
    with urllib.request.urlopen(address, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    while "loss" not in text:
        text = urllib.request.urlopen(address, timeout=30).read().decode()
    assert 'holdfast_loss{run="r\\"un"} 2.5\n' in text and 'holdfast_iteration{run="r\\"un"} 3' in text
    assert "mfu" not in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace("/metrics", "/other"), timeout=30)
    follower.stdin.close()
    assert follower.wait(30) == 0


def test_metrics_are_served_again_on_the_same_port_after_a_failure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    config, sink = Config(log=LogConfig(metrics_port=port)), PrometheusSink()
    for _ in range(2):  # a full disk, for example: what was sent cannot be recorded, and the tracker is opened again
        sink.open(tmp_path, config, None)
        sink.send({"iteration": 3, "loss": 2.5})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"holdfast_loss" in answer.read()
    sink.close(False)


def test_a_tracker_needs_a_run_folder(tmp_path):
    prefix = write_dataset(tmp_path / "corpus")
    with pytest.raises(UsageError, match="give --save DIR"):
        run(["train", "gpt_tiny", "--data-path", str(prefix), "--metrics-port", "0"])


def test_trackers_that_cannot_start_do_not_end_the_training(tmp_path, capsys):
    (tmp_path / "logs").write_text("a file where the folder should be")
    assert start_trackers(tmp_path) is None
    assert "the trackers cannot start" in capsys.readouterr().err

"""Training on the virtual cluster: the same numbers as on one machine, whatever happens to the job on its way."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.reader import open_checkpoint
from tests.corpus import VOCABULARY, write_dataset
from tests.launch.conftest import Lab, read_json_lines, tail

# Every start imports torch six times; on a machine that does other things too this takes its time.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

ITERATIONS = 300
CONFIG = f"""
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = {VOCABULARY}

[data]
seq_length = 32
split = "100,0,0"
num_workers = 0

[train]
train_iters = {ITERATIONS}
micro_batch_size = 2
global_batch_size = 8
eval_interval = 0
save_interval = 25
keep_last = 2

[optimizer]
lr = 0.001
lr_decay_style = "constant"

[log]
tensorboard = false
"""


@pytest.fixture(scope="module")
def inputs(cluster: Lab) -> Iterator[tuple[Path, Path]]:
    """Configuration and data, where every node sees them."""
    folder = cluster.folder / "inputs"
    folder.mkdir()
    config = folder / "config.toml"
    config.write_text(CONFIG)
    yield config, write_dataset(folder / "corpus")


@pytest.fixture(scope="module")
def uninterrupted(cluster: Lab, inputs: tuple[Path, Path]) -> Path:
    """The same run on one machine with the same number of ranks, and no trouble."""
    config, data = inputs
    run = cluster.folder / "undisturbed"
    cluster.holdfast("train", config, "--data-path", data, "--save", run, "--nproc-per-node", "4")
    return run


def launch(lab: Lab, inputs: tuple[Path, Path], run: Path, *flags: str) -> str:
    config, data = inputs
    train = ["train", config, "--data-path", data, "--save", run, "--nproc-per-node", "2"]
    done = lab.holdfast("launch", "slurm", *train, "--nodes", "2", "--cpus-per-task", "2", *flags)
    return done.stdout.strip()


def losses(run: Path) -> dict[int, float]:
    """Loss of each iteration; one that was done again after a resume must have come out the same."""
    found: dict[int, float] = {}
    for record in read_json_lines(run / "metrics.jsonl"):
        iteration, loss = int(str(record["iteration"])), float(str(record["loss"]))
        assert found.setdefault(iteration, loss) == loss, f"iteration {iteration} was {found[iteration]} and is {loss}"
    return found


def state(run: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer at the end, however they were sharded."""
    checkpoint = open_checkpoint(run / "checkpoints" / f"step-{ITERATIONS:08d}")
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def assert_same_run(run: Path, other: Path) -> None:
    logged, expected = losses(run), losses(other)
    assert logged == {iteration: expected[iteration] for iteration in logged}
    # the metrics may lack an iteration that was done and not yet logged when its start was killed
    assert len(expected) - len(logged) < recorded(run).count("started")
    mine, theirs = state(run), state(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not np.array_equal(mine[name], theirs[name])] == []


def log(run: Path) -> str:
    return "\n".join(f"--- {path}\n{tail(path, 40)}" for path in sorted((run / "launch").glob("*.out")))


class Watch:
    """Waits for what a run does, and shows its output when it does not."""

    def __init__(self, lab: Lab, run: Path) -> None:
        self.lab, self.run = lab, run

    def until(self, what: str, condition: Callable[[], object]) -> None:
        try:
            self.lab.wait(what, condition)
        except BaseException:
            print(log(self.run))
            raise

    def iterations(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def nodes(self, job: str) -> list[str]:
        return self.lab.run("scontrol", "show", "hostnames", self.lab.field(job, "NodeList")).stdout.split()

    def until_it_trains(self) -> None:
        done = self.iterations()
        self.until("progress", lambda: self.iterations() > done + 10)

    def until_restarted(self, job: str, restarts: int) -> None:
        self.until(f"restart {restarts}", lambda: self.lab.field(job, "Restarts") == str(restarts))
        self.until("running job", lambda: self.lab.states(job) == ["RUNNING"])

    def until_done(self, job: str) -> None:
        self.until(
            "end", lambda: self.lab.states(job) and self.lab.states(job)[0] in ("COMPLETED", "FAILED", "CANCELLED")
        )
        assert self.lab.states(job) == ["COMPLETED"], log(self.run)


def resumed_from(run: Path) -> list[int]:
    return [int(str(event["step"])) for event in read_json_lines(run / "events.jsonl") if event["event"] == "resumed"]


def recorded(run: Path) -> list[str]:
    return [str(record["event"]) for record in read_json_lines(run / "launch" / "jobs.jsonl")]


@pytest.mark.slow
def test_signals_requeues_and_cancels_change_nothing(
    lab: Lab, shared: Path, inputs: tuple[Path, Path], uninterrupted: Path
) -> None:
    run = shared / "run"
    watch = Watch(lab, run)
    job = launch(lab, inputs, run)
    watch.until_it_trains()

    # what Slurm sends before the time limit
    lab.run("scancel", "--batch", "--signal=USR1", job)
    watch.until_restarted(job, 1)
    watch.until_it_trains()
    assert recorded(run) == ["submitted", "started", "requeued", "started"], log(run)

    lab.run("scontrol", "requeue", job)
    watch.until_restarted(job, 2)
    watch.until_it_trains()

    lab.run("scancel", job)
    watch.until("cancelled job", lambda: lab.states(job) == ["CANCELLED"])
    job = lab.holdfast("launch", "resume", run).stdout.strip()
    watch.until_done(job)
    assert recorded(run)[-1] == "finished"
    assert_same_run(run, uninterrupted)
    assert [step > 0 for step in resumed_from(run)] == [True] * 3, log(run)
    assert "all iterations are done" in lab.holdfast("launch", "logs", "-f", run).stdout


@pytest.mark.slow
def test_two_nodes_compute_what_one_machine_computes_requeued_and_then_stopped(
    lab: Lab, shared: Path, inputs: tuple[Path, Path], uninterrupted: Path
) -> None:
    run = shared / "run"
    watch = Watch(lab, run)
    job = launch(lab, inputs, run)
    watch.until_it_trains()
    lab.run("scancel", "--batch", "--signal=USR1", job)
    watch.until_restarted(job, 1)
    watch.until_it_trains()
    assert recorded(run) == ["submitted", "started", "requeued", "started"], log(run)
    (resumed,) = resumed_from(run)
    status = json.loads(lab.holdfast("launch", "status", run, "--json").stdout)
    assert (status["jobs"][0]["job"], status["jobs"][0]["state"]) == (job, "RUNNING")
    assert status["iteration"] >= 10
    assert len(status["jobs"][0]["nodes"].split("-")) == 2

    lab.holdfast("launch", "stop", run)
    assert lab.states(job) == ["COMPLETED"]
    assert recorded(run)[-1] == "stopped", log(run)
    # asked to persist while the run goes on, the keepers of both nodes agree on the step that it ends with
    ended, events = max(losses(run)), read_json_lines(run / "events.jsonl")
    asked = [event["step"] for event in events if event["event"] == "persisted" and event["reason"] != "save"]
    asked = [step for step in asked if int(str(step)) > resumed]
    assert set(asked) <= {ended} and (run / "checkpoints" / f"step-{ended:08d}").exists(), events
    expected = losses(uninterrupted)
    assert losses(run) == {iteration: expected[iteration] for iteration in losses(run)}
    assert "stopped: persisted on request" in lab.holdfast("launch", "status", run).stdout
    ended = lab.holdfast("launch", "stop", run, check=False)
    assert (ended.returncode, "is active" in ended.stderr) == (1, True)


def test_a_run_that_cannot_start_is_not_tried_again_and_requeues_are_counted(
    lab: Lab, shared: Path, inputs: tuple[Path, Path]
) -> None:
    """The data vanish between submission and start."""
    config, data = inputs
    mine = [shutil.copy(data.with_suffix(suffix), shared) for suffix in (".bin", ".idx")]
    run = shared / "run"
    watch = Watch(lab, run)
    job = launch(lab, (config, shared / data.name), run, "--sbatch=--hold", "--max-requeues", "0")
    for path in mine:
        Path(path).unlink()
    lab.run("scontrol", "release", job)
    watch.until("end", lambda: lab.states(job) == ["FAILED"])
    assert recorded(run) == ["submitted", "started", "failed"], log(run)
    lab.run("scontrol", "requeue", job)
    watch.until("giving up", lambda: recorded(run)[-1] == "gave up")
    watch.until("end", lambda: lab.states(job) == ["FAILED"])
    status = json.loads(lab.holdfast("launch", "status", run, "--json").stdout)
    assert "gave up" in status["jobs"][0]["detail"]


@pytest.mark.slow
def test_the_real_time_limit_requeues_the_run(lab: Lab, shared: Path, inputs: tuple[Path, Path]) -> None:
    run = shared / "run"
    watch = Watch(lab, run)
    job = launch(lab, inputs, run, "--train-iters", "1000000", "--time", "3:00", "--signal-seconds", "30")
    watch.until_it_trains()
    watch.until_restarted(job, 1)
    watch.until_it_trains()
    assert recorded(run) == ["submitted", "started", "requeued", "started"]
    assert resumed_from(run), log(run)


@pytest.mark.slow
def test_lost_nodes_change_nothing(lab: Lab, shared: Path, inputs: tuple[Path, Path], uninterrupted: Path) -> None:
    if not lab.has_namespaces:
        pytest.skip("virtual nodes share one machine here (not root): none can be lost alone")
    run = shared / "run"
    watch = Watch(lab, run)
    job = launch(lab, inputs, run)
    watch.until_it_trains()

    lab.run("scontrol", "update", f"nodename={watch.nodes(job)[1]}", "state=down", "reason=test")
    watch.until_restarted(job, 1)
    watch.until_it_trains()

    # slurmd and all that ran on the node, by kill -9: with slurmd alone the run would end before Slurm notices
    lab.kill_node(lab.field(job, "BatchHost"))
    watch.until("restart", lambda: int(lab.field(job, "Restarts") or 0) >= 2)
    watch.until_done(job)
    assert_same_run(run, uninterrupted)
    assert recorded(run).count("started") >= 3, recorded(run)
    assert resumed_from(run), log(run)


def test_the_job_prints_what_it_resolved_before_torch_starts(lab: Lab, shared: Path, inputs: tuple[Path, Path]) -> None:
    config, data = inputs
    train = ["train", config, "--data-path", data, "--save", shared / "run", "--nproc-per-node", "2"]
    shown = lab.holdfast(
        "launch", "slurm", *train, "--nodes", "2", "--tensor-model-parallel-size", "2", "--dry-run"
    ).stdout
    assert "2 nodes x 2 ranks: 4 ranks, tensor 2, pipeline 1, data 2" in shown
    assert not (shared / "run").exists()
    assert subprocess.run(["bash", "-n"], input=shown, text=True).returncode == 0

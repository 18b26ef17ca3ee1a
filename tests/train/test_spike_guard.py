"""The threshold of the spike guard, and a run that skips steps by it."""

import gzip
import json
import math
import os
import signal
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoint import open_checkpoint
from holdfast.config import ParallelConfig
from holdfast.system.errors import UsageError
from holdfast.system.journal import read_journal
from holdfast.train import spike_response
from holdfast.train.checks.preflight import resolve
from holdfast.train.profiling import profiled_steps
from holdfast.train.spike_guard import LEAST, RECENT, SpikeGuard
from holdfast.train.state import Progress
from holdfast.train.worker import run_worker
from tests.corpus import write_dataset
from tests.distributed.test_kill import assert_same_state, final_state
from tests.distributed.test_layouts import tiny, train_on
from tests.gloo import spawn_ranks
from tests.grids import mostly_slow


def test_the_threshold_is_the_median_plus_robust_deviations():
    progress = Progress()
    guard = SpikeGuard(progress, 6.0)
    losses = [3.0 + 0.1 * math.sin(number) for number in range(200)]
    for number, loss in enumerate(losses):
        assert (guard.threshold() == math.inf) == (number < LEAST)
        guard.note(loss)
    recent = losses[-RECENT:]
    median = statistics.median(recent)
    mad = statistics.median(abs(loss - median) for loss in recent)
    assert guard.threshold() == pytest.approx(median + 6 * 1.4826 * mad)
    guard.note(1e6)
    guard.note(math.nan)
    assert guard.threshold() == pytest.approx(median + 6 * 1.4826 * mad, rel=0.01)  # robust
    again = Progress()
    again.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert SpikeGuard(again, 6.0).threshold() == guard.threshold()


def test_equal_losses_leave_a_margin():
    progress = Progress(recent_losses=[2.0] * LEAST)
    assert SpikeGuard(progress, 5.0).threshold() == pytest.approx(2.1)


@pytest.mark.distributed
def test_a_spike_leaves_the_weights_as_they_are_and_is_recorded(tmp_path):
    save = tmp_path / "run"
    config = tiny(write_dataset(tmp_path / "corpus"), save)
    config = replace(
        config,
        train=replace(config.train, train_iters=30, eval_interval=0),
        # a model that does not learn: half of its losses are above such a threshold
        optimizer=replace(config.optimizer, lr=1e-9, spike_guard=1e-6),
        log=replace(config.log, profile="2:3"),
    )
    records = train_on(1, config, ParallelConfig())
    assert not (save / "rank_times.jsonl").exists()  # one rank has no others to compare with
    spikes = [event for event in read_journal(save / "events.jsonl") if event["event"] == "spike"]
    assert spikes and len(spikes) == records[-1]["skipped_iterations"]
    losses = {record["iteration"]: record["loss"] for record in records}
    for spike in spikes:
        assert spike["step"] > LEAST and spike["loss"] > spike["threshold"]
        assert losses[spike["step"]] == pytest.approx(spike["loss"])
    with open_checkpoint(save) as checkpoint:
        updates = {int(checkpoint.tensor(name)) for name in checkpoint.tensors if name.endswith(".step")}
    assert updates == {30 - len(spikes)}
    with gzip.open(Path(save) / "profile" / "rank-0.json.gz") as trace:
        assert len(json.load(trace)["traceEvents"]) > 100


STEPS, INTERVAL, SPIKES = 34, 4, (24, 27)
"""Steps of a run, steps between its snapshots, and the steps whose losses are made to look like spikes."""


def train_with_spikes(config, spikes, killed_at):
    """Trains on batches whose loss the guard takes for a spike; the process ends itself before step `killed_at`, once."""
    plain, done = spike_response.SpikeResponse.check, []

    def check(self, loss, threshold):
        step = self._progress.step + 1
        done.append(step)
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, 1e3 if step in spikes else loss, threshold)

    spike_response.SpikeResponse.check = check
    run_worker(config)
    return done


def rewinding(prefix, save, world, snapshot_interval=INTERVAL, **optimizer):
    config = tiny(prefix, save)
    config = replace(
        config,
        train=replace(config.train, train_iters=STEPS, eval_interval=0),
        optimizer=replace(config.optimizer, **{"spike_guard": 50.0, "spike_action": "rewind", **optimizer}),
        snapshot=replace(config.snapshot, snapshot_interval=snapshot_interval),
        parallel=ParallelConfig(nproc_per_node=world),
    )
    return resolve(config, world)[0]


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "killed_at"), mostly_slow([(1, 29), (2, 26)], [(1, 29)]))
def test_a_rewind_leaves_out_the_batches_since_the_snapshot_also_after_a_kill(world, killed_at, tmp_path):
    prefix, left_out = write_dataset(tmp_path / "corpus"), {21, 22, 23, 24, 25, 26, 27}
    spawn_ranks(world, train_with_spikes, rewinding(prefix, tmp_path / "whole", world), SPIKES, 0)
    events = [event for event in read_journal(tmp_path / "whole" / "events.jsonl") if event["event"] == "spike"]
    assert [(event["step"], event["action"], event["to_step"], event["batches"]) for event in events] == [
        (24, "rewind", 20, 4),  # the snapshot after step 24 holds the weights of step 20
        (27, "rewind", 24, 3),
    ]
    metrics = list(read_journal(tmp_path / "whole" / "metrics.jsonl"))
    assert [record["iteration"] for record in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["skipped_iterations"] == len(left_out)
    with open_checkpoint(tmp_path / "whole") as checkpoint:
        updates = {int(checkpoint.tensor(name)) for name in checkpoint.tensors if name.endswith(".step")}
    assert updates == {STEPS - len(left_out)}

    killed = rewinding(prefix, tmp_path / "killed", world)
    with pytest.raises(AssertionError, match="died without a word|rank "):
        spawn_ranks(world, train_with_spikes, killed, SPIKES, killed_at)
    done = spawn_ranks(world, train_with_spikes, killed, SPIKES, 0)
    assert done[0][0] % INTERVAL == 1 and 1 < done[0][0] <= killed_at  # from a snapshot
    assert_same_state(final_state(tmp_path / "killed"), final_state(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.distributed
def test_spikes_after_every_rewind_end_the_run(tmp_path):
    config = rewinding(write_dataset(tmp_path / "corpus"), tmp_path / "run", 1, snapshot_interval=8)
    message = r"iteration 30: loss .* after 3 rewinds to step 24: the weights of that step .*--load RUN/checkpoints"
    with pytest.raises(AssertionError, match=message):
        spawn_ranks(1, train_with_spikes, config, (26, 27, 28, 30), 0)


def test_a_rewind_without_a_snapshot_to_go_back_to_is_refused(tmp_path):
    with pytest.raises(UsageError, match="give the number of steps to go back"):
        rewinding(tmp_path, tmp_path / "run", 1, snapshot_interval=1)
    with pytest.raises(UsageError, match="needs --spike-guard"):
        rewinding(tmp_path, tmp_path / "run", 1, spike_guard=None)


@pytest.mark.parametrize("text", ["10", "3:2", "0:4", "a:b", ":", "1:2:3"])
def test_profiled_steps_are_checked_before_a_rank_starts(text):
    with pytest.raises(UsageError, match="give FIRST:LAST"):
        profiled_steps(text)
    assert list(profiled_steps("10:13")) == [10, 11, 12, 13]

"""The iteration line for a terminal fits 80 columns, however long the run and large its numbers."""

import time

import pytest
import torch

from holdfast.system.journal import read_journal
from holdfast.train.metrics import Iteration, Reporter, terminal_line
from tests.disks import small_disk

RECORD = {"iteration": 3, "loss": 4.52, "lr": 3e-4, "grad_norm": 1.3, "tokens_per_s": 812.0}
LARGE = {"iteration": 12345, "loss": 12345.678, "lr": 1.2345e-10, "grad_norm": 12345.6, "tokens_per_s": 987.6e6}


def reporter_of(folder, tensorboard=False):
    return Reporter(
        folder,
        active=True,
        iterations=1000,
        log_interval=1,
        terms=("lm_loss",),
        flops_per_token=1,
        tokens_per_sample=16,
        world=1,
        device=torch.device("cpu"),
        tensorboard=tensorboard,
    )


def test_a_line_shows_step_loss_rate_and_time_left():
    line = terminal_line(RECORD, 100, 3725.0)
    assert line == "step   3/100  loss 4.5200  lr 3.00e-04  grad 1.30     812 tok/s  ETA 1:02:05"


@pytest.mark.parametrize(("record", "iterations"), [(RECORD, 100), (LARGE, 500_000), (RECORD, 10_000_000)])
@pytest.mark.parametrize("left", [None, 0.2, 86399.0, 40 * 86400.0])
def test_a_line_fits_a_terminal(record, iterations, left):
    line = terminal_line(record, iterations, left)
    assert "\n" not in line and len(line) <= 80, len(line)


def test_lines_of_a_run_have_the_same_columns_whatever_its_speed():
    for iterations in (100, 1000, 10_000, 100_000):
        lines = [
            terminal_line({**RECORD, "tokens_per_s": rate}, iterations, left)
            for rate in (812.0, 6.2e3, 10.8e3, 120.5e3)
            for left in (None, 1700.0)
        ]
        assert len({line.index(" tok/s") for line in lines}) == 1 and len({"grad" in line for line in lines}) == 1


def test_an_evaluation_gets_a_second_line():
    record = {**RECORD, "validation_loss": 4.5, "validation_perplexity": 90.02}
    assert terminal_line(record, 100, 1.0).splitlines()[1] == "  validation loss 4.5000, perplexity 90.02"


def test_records_carry_the_time_the_peak_memory_and_the_time_of_an_evaluation(tmp_path):
    reporter = reporter_of(tmp_path)
    before = time.time()
    for step, extra in ((1, {}), (2, {"validation_loss": 4.0, "validation_perplexity": 50.0})):
        ended = time.perf_counter() - 0.5 * bool(extra)
        numbers = torch.tensor([1.0, 4.5])
        reporter.report(Iteration(step, 1e-3, 8, 8 * step, 128 * step, numbers, 0.0, None, ended, extra), 0)
    reporter.close()
    first, second = read_journal(tmp_path / "metrics.jsonl")
    assert before - 1 <= first["time"] <= second["time"] <= time.time() + 1
    assert first["memory_bytes"] > 1_000_000 and "evaluation_ms" not in first and second["evaluation_ms"] >= 500


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_event_files_and_not_the_training(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "32k") as disk:
        reporter = reporter_of(disk, tensorboard=True)
        numbers = torch.tensor([1.0, 4.5])
        for step in range(1, 1001):
            reporter.report(Iteration(step, 1e-3, 8, 8 * step, 128 * step, numbers, 0.0, None, 1e6 + step), 0)
        reporter.close()
        assert next(read_journal(disk / "metrics.jsonl"))["iteration"] == 1
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2 and "metrics.jsonl: No space left" in warnings[0] + warnings[1], warnings
    assert any("TensorBoard" in line for line in warnings)

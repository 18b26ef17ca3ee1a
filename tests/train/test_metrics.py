"""The iteration line for a terminal fits 80 columns, however long the run and large its numbers."""

import pytest

from holdfast.train.metrics import terminal_line

RECORD = {"iteration": 3, "loss": 4.52, "lr": 3e-4, "grad_norm": 1.3, "tokens_per_s": 812.0}
LARGE = {"iteration": 12345, "loss": 12345.678, "lr": 1.2345e-10, "grad_norm": 12345.6, "tokens_per_s": 987.6e6}


def test_a_line_shows_step_loss_rate_and_time_left():
    line = terminal_line(RECORD, 100, 3725.0)
    assert line == "step   3/100  loss 4.5200  lr 3.00e-04  grad 1.3  812 tok/s  ETA 1:02:05"


@pytest.mark.parametrize(("record", "iterations"), [(RECORD, 100), (LARGE, 500_000), (RECORD, 10_000_000)])
@pytest.mark.parametrize("left", [None, 0.2, 86399.0, 40 * 86400.0])
def test_a_line_fits_a_terminal(record, iterations, left):
    line = terminal_line(record, iterations, left)
    assert "\n" not in line and len(line) <= 80, len(line)


def test_an_evaluation_gets_a_second_line():
    record = {**RECORD, "validation_loss": 4.5, "validation_perplexity": 90.02}
    assert terminal_line(record, 100, 1.0).splitlines()[1] == "  validation loss 4.5000, perplexity 90.02"

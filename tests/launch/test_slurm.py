"""Parsing of Slurm's times and error messages."""

import pytest

from holdfast.launch.slurm import reason, seconds_of
from holdfast.system.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("1:00:00", 3600),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_time_limits_in_every_format(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_a_time_limit_in_words_is_refused() -> None:
    with pytest.raises(UsageError, match="not a time in Slurm's format"):
        seconds_of("two hours")


def test_the_reason_is_slurms_message_without_its_prefixes() -> None:
    output = "sbatch: error: invalid partition specified: gpu\nallocation failure: Invalid partition name specified\n"
    assert reason(output) == "invalid partition specified: gpu; allocation failure: Invalid partition name specified"
    assert reason("") == "it gave no reason"

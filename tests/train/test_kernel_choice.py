"""The kernels of a run: measured once per device and shape, remembered, and overridable."""

from collections.abc import Callable, Collection

import pytest

from holdfast.system.errors import HoldfastError
from holdfast.train import kernel_choice

TIMES = {"cudnn": 0.9, "flash": 1.2, "efficient": 2.0}


def fastest(
    wanted: str, key: str, measure: Callable[[], dict[str, float]], allowed: Collection[str] = TIMES
) -> tuple[str, dict[str, float]]:
    return kernel_choice.fastest("--attention-backend", wanted, key, measure, allowed)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_fastest_is_measured_once(cache):
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return TIMES

    for _ in range(2):
        assert fastest("auto", "a shape", measure) == ("cudnn", TIMES)
    assert len(calls) == 1
    assert fastest("auto", "another shape", lambda: {"flash": 1.0})[0] == "flash"
    assert len(calls) == 1


@pytest.mark.parametrize(
    "kept",
    ["[]", "{", '{"what": "a shape", "ms": 3}', '{"what": "a shape", "ms": {"newer": 0.1}}',
     '{"what": "a shape", "ms": {"cudnn": null}}', '{"what": "another", "ms": {"cudnn": 9.0}}'],
)  # fmt: skip
def test_what_another_version_kept_is_measured_again(cache, kept):
    file = kernel_choice._file("a shape")
    file.parent.mkdir(parents=True)
    file.write_text(kept)
    assert fastest("auto", "a shape", lambda: TIMES) == ("cudnn", TIMES)
    assert fastest("auto", "a shape", dict) == ("cudnn", TIMES)


def test_whether_a_graph_is_faster_is_measured_once(cache, capfd):
    choice = kernel_choice.GraphChoice("a pass", rank=0)
    assert choice.known() is None
    assert choice.decide(eager=100.0, graph=105.0) and choice.known()  # single passes vary
    assert "100.0 ms kernel by kernel, 105.0 ms as a CUDA graph" in capfd.readouterr().err
    assert not choice.decide(eager=100.0, graph=120.0)
    assert choice.known() is False
    assert kernel_choice.GraphChoice("another pass", rank=0).known() is None


def test_only_what_is_allowed_is_chosen():
    allowed = ("flash", "efficient")  # those that a deterministic run may call
    assert fastest("auto", "a shape", lambda: TIMES, allowed)[0] == "flash"
    with pytest.raises(HoldfastError, match="choose flash 1.200, efficient 2.000"):
        fastest("cudnn", "a shape", lambda: TIMES, allowed)
    assert fastest("auto", "a shape", dict)[0] == "cudnn"  # all times were kept


def test_the_user_chooses_among_those_that_take_the_shape():
    assert fastest("efficient", "a shape", lambda: TIMES)[0] == "efficient"
    with pytest.raises(HoldfastError, match="--attention-backend flash cannot compute a masked shape"):
        fastest("flash", "a masked shape", lambda: {"efficient": 1.0})
    with pytest.raises(HoldfastError, match="--no-compile"):
        fastest("auto", "no shape", dict)

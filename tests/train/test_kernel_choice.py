"""The attention kernel of a run: measured once per device and shape, remembered, and overridable."""

import pytest

from holdfast.system.errors import HoldfastError
from holdfast.train.kernel_choice import fastest

TIMES = {"cudnn": 0.9, "flash": 1.2, "efficient": 2.0}


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
        assert fastest("auto", "a shape", measure, deterministic=False) == ("cudnn", TIMES)
    assert len(calls) == 1
    assert fastest("auto", "another shape", lambda: {"flash": 1.0}, deterministic=False)[0] == "flash"
    assert len(calls) == 1


@pytest.mark.parametrize(
    "kept", ["[]", '{"a shape": 3}', '{"a shape": {"newer": 0.1}}', '{"a shape": {"cudnn": null}}', "{"]
)
def test_what_another_version_kept_is_measured_again(cache, kept):
    cache.mkdir()
    (cache / "kernels.json").write_text(kept)
    assert fastest("auto", "a shape", lambda: TIMES, deterministic=False) == ("cudnn", TIMES)
    assert fastest("auto", "a shape", dict, deterministic=False) == ("cudnn", TIMES)


def test_a_deterministic_run_leaves_cudnn_out():
    assert fastest("auto", "a shape", lambda: TIMES, deterministic=True)[0] == "flash"
    with pytest.raises(HoldfastError, match="choose flash 1.200, efficient 2.000"):
        fastest("cudnn", "a shape", lambda: TIMES, deterministic=True)


def test_the_user_chooses_among_those_that_take_the_shape():
    assert fastest("efficient", "a shape", lambda: TIMES, deterministic=False)[0] == "efficient"
    with pytest.raises(HoldfastError, match="--attention-backend flash cannot compute a masked shape"):
        fastest("flash", "a masked shape", lambda: {"efficient": 1.0}, deterministic=False)
    with pytest.raises(HoldfastError, match="--no-compile"):
        fastest("auto", "no shape", dict, deterministic=False)

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.assets.loopback import Server
from tests.leftovers import NAME as SESSION


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and none of the user's settings."""
    for name in list(os.environ):
        ours = name.startswith("HOLDFAST_") and name != SESSION
        if ours or name in ("MEGATRON_CACHE", "LOCAL_RANK", "RANK") or "PROXY" in name.upper():
            monkeypatch.delenv(name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOLDFAST_CACHE", str(folder))
    return folder

"""A grid of cases of which `make test` runs a few and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """All cases for `parametrize`; those that are not in `short` carry the slow marker."""
    cases, short = list(cases), list(short)
    assert all(case in cases for case in short), "a case of the short run is not in the grid"
    return [case if case in short else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

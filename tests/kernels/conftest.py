"""Kernels run on the GPU where there is one, else in Triton's interpreter (chosen in tests/conftest.py)."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Kernels run on the GPU where there is one, else in Triton's interpreter, which must be chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Transformers as oracle in double precision: its own code, run with every mention of fp32 read as fp64."""

import sys
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, modeling_rope_utils


class WideTorch:
    """The torch module, where float and float32 are float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def wide(*modules):
    """Makes modules of transformers compute in fp64 what they would cast to fp32: norms, rotary tables, their scaling."""
    modules = [modeling_rope_utils, *modules]
    usual, narrow = torch.get_default_dtype(), torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # Gemma's norms call the method
    for module in modules:
        module.torch = WideTorch()
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
        torch.Tensor.float = narrow
        for module in modules:
            module.torch = torch


class WideModel(torch.nn.Module):
    """A model of transformers that computes in fp64 throughout."""

    def __init__(self, model, module):
        super().__init__()
        self.model, self.module, self.config = model, module, model.config

    def forward(self, *arguments, **keywords):
        with wide(self.module):
            return self.model(*arguments, **keywords)


def load_wide(folder, kind=AutoModelForCausalLM):
    """The model of a Hugging Face folder, in fp64 throughout."""
    module = sys.modules[type(kind.from_pretrained(folder)).__module__]
    with wide(module):
        return WideModel(kind.from_pretrained(folder, dtype=torch.float64).eval(), module)


def load_wide_bert(folder):
    return load_wide(folder, AutoModelForPreTraining)

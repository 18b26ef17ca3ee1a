"""`train --load` of another format: what is loaded is the source as it is, and it is converted once."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from holdfast.config import Config, TrainConfig
from holdfast.conversion.sources import read_model
from holdfast.conversion.train_load import with_converted_load
from tests.conversion.families import build_family

NORM = "decoder.final_layernorm.weight"


def converted(load: Path, run: Path) -> Path:
    config = with_converted_load(replace(Config(), train=TrainConfig(load=str(load), save=str(run))))
    assert config.train.load is not None
    return Path(config.train.load)


def norm_of(folder: Path) -> float:
    return float(np.mean(read_model(folder).tensors[NORM].floats()))


def test_a_source_that_was_written_again_is_converted_again(tmp_path: Path) -> None:
    model = build_family("llama3")
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.model.norm.weight, value)
        model.save_pretrained(tmp_path / "hf")
        folder = converted(tmp_path / "hf", tmp_path / "run")
        assert norm_of(folder) == value
        written = (folder / "config.toml").stat().st_mtime_ns
        assert converted(tmp_path / "hf", tmp_path / "run") == folder
        assert (folder / "config.toml").stat().st_mtime_ns == written

"""Megatron-core itself as oracle, TP 1 and TP 2: it loads what we write, we read what it saves, logits equal to 1e-12 in fp64."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import convert
from holdfast.conversion.command import ConvertOptions
from holdfast.conversion.converting import run_conversion
from tests.conversion.families import FAMILIES as OTHERS
from tests.conversion.families import build_family
from tests.conversion.huggingface.test_huggingface import build
from tests.conversion.oracles import load_wide, load_wide_bert

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
WORKER = Path(__file__).with_name("megatron_core_worker.py")
IDS = [int(n) for n in np.random.default_rng(2).integers(0, 300, 24)]
FAMILIES = {"gpt": "gpt2", "bert": "megatron-bert", "llama": "llama", "qwen3": "qwen3"}
MORE = FAMILIES | {
    name: name
    for name in (
        "llama3.2-tied", "llama-linear", "qwen2", "qwen2.5-yarn", "qwen2-windows", "qwen3-windows", "mistral",
        "gpt-neox-serial",
    )
}  # fmt: skip


def run_ranks(tmp_path, world, jobs):
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    rendezvous = tmp_path / "rendezvous"
    environment = {**os.environ, "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rendezvous), str(tmp_path / "jobs.json")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=400)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)[-4000:]


def theirs(folder, family):
    model = (load_wide_bert if family == "bert" else load_wide)(folder)
    with torch.no_grad():
        found = model(torch.tensor(IDS)[None])
    if family == "bert":
        return found.prediction_logits[0].numpy(), found.seq_relationship_logits[0].numpy()
    return found.logits[0].numpy(), None


def assert_equal(path, wanted):
    logits, sentence = wanted
    found = np.load(path)[:, : logits.shape[1]]
    assert np.abs(found - logits).max() < 1e-12 * max(1.0, np.abs(logits).max())
    if sentence is not None:
        assert np.abs(np.load(path.replace(".npy", ".sentence.npy")) - sentence).max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("world", "families"), [(1, MORE), (2, FAMILIES)])
def test_megatron_core_computes_the_same_function_in_both_directions(tmp_path, world, families):
    jobs, originals = [], {}
    for family, kind in families.items():
        model = build_family(kind, torch.float64) if kind in OTHERS else build(kind).double()
        if family == "gpt":
            model.config.activation_function = "gelu"  # unfused Megatron-core has the exact form
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        originals[family] = tmp_path / f"{family}-original"
        model.save_pretrained(originals[family])
        ours = convert(originals[family], tmp_path / f"{family}-ours", to="megatron", tensor_model_parallel_size=world)
        with torch.serialization.safe_globals([type(None)]):
            args = vars(torch.load(ours / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)["args"])
        args = {key: value for key, value in args.items() if not isinstance(value, torch.dtype)}
        settings = {"family": family, "args": args, "ids": IDS}
        jobs.append({**settings, "do": "load", "folder": str(ours), "logits": str(tmp_path / f"{family}-load.npy")})
        saved = tmp_path / f"{family}-saved-by-megatron"
        jobs.append({**settings, "do": "save", "folder": str(saved), "logits": str(tmp_path / f"{family}-save.npy")})
    run_ranks(tmp_path, world, jobs)
    for family in families:
        assert_equal(str(tmp_path / f"{family}-load.npy"), theirs(originals[family], family))
        saved = tmp_path / f"{family}-saved-by-megatron"
        assert (saved / "iter_0000005/.metadata").is_file()
        report = run_conversion(
            ConvertOptions(source=saved, destination=tmp_path / f"{family}-back", to="hf", verify=True)
        )
        assert "torch_dist" in report.source and report.verification["exact"]
        assert_equal(str(tmp_path / f"{family}-save.npy"), theirs(tmp_path / f"{family}-back", family))

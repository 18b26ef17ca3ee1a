"""`holdfast inspect CHECKPOINT`: what it is, and for a hostile file what it mentions, without running it."""

import json

import pytest
import torch

from holdfast import cli
from holdfast.inspection import inspect_path
from tests.conversion.files.test_hostile import Shell, rank_zip, shell_legacy, shell_zip
from tests.conversion.holdfast_runs import GPT2_TINY, build_gpt, write_run
from tests.conversion.huggingface.test_huggingface import build
from tests.conversion.megatron.test_torch_dist import write_torch_dist
from tests.conversion.megatron_files import Spec, make_truth, write_megatron


def test_a_megatron_run_is_described(tmp_path, capsys):
    spec = Spec(layers=4, hidden=16, heads=4)
    run = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(2)), 1.0, 2, 2, 2, orig_vocab_size=101)
    cli.run(["inspect", str(run), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "checkpoint" and facts["form"] == "megatron" and facts["checkpoint_version"] == 1.0
    assert (facts["tensor_parallel"], facts["pipeline_parallel"], facts["virtual_pipeline"]) == (2, 2, 2)
    assert facts["iteration"] == 100 and facts["dtypes"] == {"F16": 52} and facts["names"] == "legacy"
    assert facts["architecture"]["true_vocab_size"] == 101 and facts["architecture"]["padded_vocab_size"] == 112
    assert facts["architecture"]["activation"] == "gelu_tanh"
    cli.run(["inspect", str(run)])
    said = capsys.readouterr().out
    assert "TP 2 × PP 2 × VPP 2, iteration 100" in said and "vocabulary 101, 112 with padding" in said


def test_other_forms_are_described(tmp_path):
    spec = Spec()
    write_torch_dist(tmp_path / "t", spec, make_truth(spec, spec.padded(1)))
    build("llama").save_pretrained(tmp_path / "hf")
    write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    for name, form, layers in (("t", "torch_dist", 4), ("hf", "huggingface", 2), ("run/checkpoints", "holdfast", 2)):
        kind, description = inspect_path(tmp_path / name)
        assert kind == "checkpoint" and not description.problems
        assert description.facts["form"] == form and description.facts["architecture"]["num_layers"] == layers


@pytest.mark.parametrize("make", [shell_zip, shell_legacy])
def test_a_hostile_file_is_described_and_not_run(tmp_path, capsys, make):
    mark = tmp_path / "executed"
    release = tmp_path / "release.zip"
    release.write_bytes(rank_zip(("release/mp_rank_00/model_optim_rng.pt", make(mark))))
    (tmp_path / "x.pt").write_bytes(make(mark))
    for path in (release, tmp_path / "x.pt"):
        with pytest.raises(SystemExit) as caught:
            cli.run(["inspect", str(path)])
        assert caught.value.code == 1
        said = capsys.readouterr()
        assert "mentions posix.system, which was not loaded" in said.out and "posix.system, where" in said.err
    assert not mark.exists()


def test_a_hostile_object_in_a_working_checkpoint_is_mentioned(tmp_path):
    spec = Spec()
    run = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    path = run / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "rng_state": Shell(tmp_path / "executed")}, path)
    _, description = inspect_path(run)
    assert "  mentions posix.system, which was not loaded" in description.lines
    assert not any("Namespace" in line for line in description.lines) and not (tmp_path / "executed").exists()

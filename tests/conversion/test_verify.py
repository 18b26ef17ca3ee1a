"""`--verify` accepts what is right and notices what is not; its two forwards agree with transformers in double precision."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import convert
from holdfast.conversion.budget import Budget
from holdfast.conversion.converting import Options, run_conversion
from holdfast.conversion.forward import huggingface_forward, megatron_forward
from holdfast.conversion.huggingface_read import read_json, read_weights
from holdfast.conversion.sources import read_model
from holdfast.conversion.verify import verify_conversion
from holdfast.errors import HoldfastError

from .holdfast_runs import GPT2_TINY, LLAMA_TINY, build_gpt, write_run
from .megatron_files import Spec, make_truth, write_megatron
from .oracles import load_wide, load_wide_bert
from .test_huggingface import build


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "megatron-bert"])
def test_both_forwards_equal_transformers(tmp_path, kind):
    model = build(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    wide = (load_wide_bert if "bert" in kind else load_wide)(tmp_path)
    ids = np.random.default_rng(1).integers(0, 300, 20)
    with torch.no_grad():
        theirs = wide(torch.tensor(ids)[None])
    wanted = {"logits": theirs.prediction_logits if "bert" in kind else theirs.logits}
    if "bert" in kind:
        wanted["sentence"] = theirs.seq_relationship_logits
    source = read_model(tmp_path)
    for ours in (
        megatron_forward(source.architecture, source.tensors, ids),
        huggingface_forward(read_json(tmp_path / "config.json"), read_weights(tmp_path, Budget())[0], ids),
    ):
        for name, values in wanted.items():
            assert np.abs(ours[name] - values.numpy()[0]).max() < 1e-12, name


@pytest.mark.parametrize("to", ["hf", "megatron", "holdfast"])
@pytest.mark.parametrize("family", ["gpt", "bert", "llama"])
def test_right_conversions_verify(tmp_path, family, to):
    spec = Spec(swiglu=True, groups=2) if family == "llama" else Spec(family=family)
    names = "mcore" if family == "llama" else "legacy"
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(2)), 3.0, 2, 2, 1, names)
    options = Options(true_vocab_size=spec.vocab, verify=True, megatron_names=names)
    report = run_conversion(source, tmp_path / "out", to, options)
    assert report.verification["exact"] is (to != "holdfast")
    assert report.verification["largest_difference"] < 1e-12 and report.verification["checksums"] > 20


@pytest.mark.parametrize("model", [GPT2_TINY, LLAMA_TINY])
def test_a_run_of_holdfast_verifies(tmp_path, model):
    run = write_run(tmp_path / "run", model, build_gpt(model))
    report = run_conversion(run, tmp_path / "hf", "hf", Options(verify=True))
    assert report.verification["exact"] and report.verification["largest_difference"] < 1e-12


def test_a_wrong_target_is_noticed(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    folder = convert(source, tmp_path / "hf", true_vocab_size=spec.vocab)
    model = read_model(source)
    from dataclasses import replace

    model = replace(model, architecture=replace(model.architecture, true_vocab_size=spec.vocab))
    verify_conversion(model, folder, "hf", {})
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.ln_1.bias"][2] += 0.5
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(HoldfastError, match=r"decoder.layers.1.input_layernorm.bias differs"):
        verify_conversion(model, folder, "hf", {})
    with pytest.raises(HoldfastError, match="holds other bits of"):
        verify_conversion(model, folder, "hf", {"model.safetensors": {"transformer.ln_f.bias": "0" * 64}})


def test_a_wrong_function_is_noticed_by_the_logits(tmp_path):
    """Bits right, configuration wrong: only the logits can tell."""
    spec = Spec(dtype=torch.float32)
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0, orig_vocab_size=spec.vocab)
    for number, (name, old, new) in enumerate(
        [("activation_function", "gelu_new", "gelu"), ("layer_norm_epsilon", "1e-05", "1e-12"), ("n_head", "4", "2")]
    ):
        folder = convert(source, tmp_path / f"hf{number}")
        text = (folder / "config.json").read_text()
        changed = text.replace(f'"{name}": {old}', f'"{name}": {new}').replace(
            f'"{name}": "{old}"', f'"{name}": "{new}"'
        )
        assert changed != text
        (folder / "config.json").write_text(changed)
        with pytest.raises(HoldfastError, match="verification failed"):
            verify_conversion(read_model(source), folder, "hf", {})

"""`--verify` accepts what is right and notices what is not; its two forwards agree with transformers in double precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import convert
from holdfast.conversion.command import ConvertOptions
from holdfast.conversion.converting import run_conversion
from holdfast.conversion.forward_functions import open_forward
from holdfast.conversion.sources import read_model
from holdfast.conversion.stream import WritePlan
from holdfast.conversion.tensors import hstack
from holdfast.conversion.verify import verify_conversion
from holdfast.system.errors import HoldfastError
from tests.conversion.holdfast_runs import GPT2_TINY, LLAMA_TINY, build_gpt, write_run
from tests.conversion.huggingface.test_huggingface import build
from tests.conversion.megatron_files import Spec, make_truth, write_megatron
from tests.conversion.oracles import load_wide, load_wide_bert


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "megatron-bert"])
def test_both_forwards_equal_transformers(tmp_path, kind):
    model = build(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    source = tmp_path / "source"
    model.save_pretrained(source)
    wide = (load_wide_bert if "bert" in kind else load_wide)(source)
    ids = np.random.default_rng(1).integers(0, 300, 20)
    with torch.no_grad():
        theirs = wide(torch.tensor(ids)[None])
    wanted = {"logits": theirs.prediction_logits if "bert" in kind else theirs.logits}
    if "bert" in kind:
        wanted["sentence"] = theirs.seq_relationship_logits
    folders = [source, convert(source, tmp_path / "own", to="holdfast")]
    if kind != "bert":  # Megatron has no BERT with the norms after each block
        split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "megatron_names": "legacy"}
        folders.append(convert(source, tmp_path / "megatron", to="megatron", **split))
    for folder in folders:
        ours = open_forward(folder).run(ids, wanted["logits"].shape[-1], None)
        for name, values in wanted.items():
            assert np.abs(ours[name] - values.numpy()[0]).max() < 1e-12, (folder.name, name)


@pytest.mark.parametrize("to", ["hf", "megatron", "holdfast"])
@pytest.mark.parametrize("family", ["gpt", "bert", "llama"])
def test_right_conversions_verify(tmp_path, family, to):
    spec = Spec(swiglu=True, groups=2) if family == "llama" else Spec(family=family)
    names = "mcore" if family == "llama" else "legacy"
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(2)), 3.0, 2, 2, 1, names)
    options = {"true_vocab_size": spec.vocab, "verify": True, "megatron_names": names}
    report = run_conversion(ConvertOptions(source=source, destination=tmp_path / "out", to=to, **options))
    assert report.verification["exact"] is (to != "holdfast")
    assert report.verification["largest_difference"] < 1e-12 and report.verification["checksums"] > 20


@pytest.mark.parametrize("model", [GPT2_TINY, LLAMA_TINY])
def test_a_run_of_holdfast_verifies(tmp_path, model):
    run = write_run(tmp_path / "run", model, build_gpt(model))
    report = run_conversion(ConvertOptions(source=run, destination=tmp_path / "hf", to="hf", verify=True))
    assert report.verification["exact"] and report.verification["largest_difference"] < 1e-12


def test_a_wrong_target_is_noticed(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    folder = convert(source, tmp_path / "hf", true_vocab_size=spec.vocab)
    model = read_model(source)

    model = replace(model, architecture=replace(model.architecture, vocab_size=spec.vocab))
    verify_conversion(source, model, folder, WritePlan([]), {})
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.ln_1.bias"][2] += 0.5
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(HoldfastError, match=r"decoder.layers.1.input_layernorm.bias differs"):
        verify_conversion(source, model, folder, WritePlan([]), {})
    with pytest.raises(HoldfastError, match="holds other bits of"):
        verify_conversion(
            source, model, folder, WritePlan([]), {"model.safetensors": {"transformer.ln_f.bias": "0" * 64}}
        )


def test_a_wrong_function_is_noticed_by_the_logits(tmp_path):
    """Bits right, configuration wrong: only the logits differ."""
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
            verify_conversion(source, read_model(source), folder, WritePlan([]), {})


def planted(name):
    """A mistake in the reader or in the renaming that changes the bits of source and target alike."""
    from holdfast.conversion.huggingface import names as huggingface_names
    from holdfast.conversion.megatron import read as megatron_read
    from holdfast.conversion.megatron import torch_dist
    from holdfast.conversion.tensors import vstack

    split_gate, split_qkv, architecture = (
        megatron_read.split_gate, huggingface_names.split_qkv, megatron_read.architecture_from_args,
    )  # fmt: skip

    def swapped_gate(base, shards):
        gate, up = split_gate(base, shards).items()
        return {gate[0]: up[1], up[0]: gate[1]}

    def interleaved(self, tensor):
        """Rotary halves taken for neighbours: [2, D/2] rows read as [D/2, 2]."""
        heads = self.args["num_attention_heads"] + 2 * (self.args.get("num_query_groups") or 0)
        local, width = heads // self.width, tensor.shape[0] // (heads // self.width)
        return tensor.reordered((local, 2, width // 2), (0, 2, 1))

    def shifted(tensor, arch):
        return split_qkv(vstack([tensor.rows(1, tensor.shape[0]), tensor.rows(0, 1)]), arch)

    def other_epsilon(*arguments):

        return replace(architecture(*arguments), norm_epsilon=0.1)

    return {
        "gate and up swapped": [(megatron_read, "split_gate", swapped_gate), (torch_dist, "split_gate", swapped_gate)],
        "versions confused": [
            (
                megatron_read._Layouts,
                "qkv",
                lambda self, tensor: tensor.reordered((3, tensor.shape[0] // 3, 1), (1, 0, 2)),
            )
        ],
        "rotary halves interleaved": [(megatron_read._Layouts, "qkv", interleaved)],
        "rows shifted": [(huggingface_names, "split_qkv", shifted)],
        "ranks in the wrong order": [(megatron_read, "hstack", lambda shards: hstack(shards[::-1]))],
        "another epsilon": [(megatron_read, "architecture_from_args", other_epsilon)],
    }[name]


@pytest.mark.parametrize(
    ("bug", "family", "dtype"),
    [
        ("gate and up swapped", "llama", None),
        ("versions confused", "gpt", None),
        ("versions confused", "gpt", "bfloat16"),
        ("rotary halves interleaved", "llama", "bfloat16"),
        ("rows shifted", "gpt", "float32"),
        ("ranks in the wrong order", "bert", None),
        ("another epsilon", "gpt", "float16"),
        ("another epsilon", "bert fused", None),
    ],
)
def test_a_mistake_of_the_reader_is_noticed(tmp_path, monkeypatch, bug, family, dtype):
    llama, bert = family == "llama", "bert" in family
    spec = Spec(swiglu=True, groups=2) if llama else Spec(family="bert" if bert else "gpt", dtype=torch.float32)
    args = {"bias_gelu_fusion": True, "openai_gelu": False} if "fused" in family else {}
    names, truth = "mcore" if llama else "legacy", make_truth(spec, spec.padded(2))
    source = write_megatron(tmp_path / "m", spec, truth, 3.0, 2, 1, 1, names, orig_vocab_size=spec.vocab, **args)
    options = ConvertOptions(source=source, destination=tmp_path / "right", verify=True, dtype=dtype)
    report = run_conversion(options)
    assert report.verification["largest_difference"] < 1e-12
    assert report.verification["exact"] is (dtype in (None, "float32") and "fused" not in family)
    for target, name, wrong in planted(bug):
        monkeypatch.setattr(target, name, wrong)
    with pytest.raises(HoldfastError, match="verification failed"):
        run_conversion(replace(options, destination=tmp_path / "wrong"))
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_every_version_verifies_with_its_own_row_order(tmp_path, version):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(2)), version, 2, 1, orig_vocab_size=101)
    report = run_conversion(ConvertOptions(source=source, destination=tmp_path / "hf", to="hf", verify=True))
    assert report.verification["exact"] and report.verification["largest_difference"] < 1e-12


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_damaged_configuration_fails_whatever_was_announced(tmp_path, to):
    """Another element type and BERT's fused GELU change the logits; a wrong epsilon behind them is noticed all the same."""
    spec = Spec(family="bert", dtype=torch.float32)
    args = {"bias_gelu_fusion": True, "openai_gelu": False, "orig_vocab_size": spec.vocab}
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0, **args)
    folder = convert(source, tmp_path / "out", to=to, dtype="float16")
    found = verify_conversion(source, read_model(source), folder, WritePlan([]), {})
    assert not found["exact"] and found["largest_difference"] < 1e-12 < found["announced_difference"] < 1e-1
    if to == "hf":
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"layer_norm_eps": 1e-05', '"layer_norm_eps": 0.1'))
    else:
        path = folder / "release/mp_rank_00/model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        state["args"].norm_epsilon = state["args"].layernorm_epsilon = 0.1
        torch.save(state, path)
    with pytest.raises(HoldfastError, match="verification failed"):
        verify_conversion(source, read_model(source), folder, WritePlan([]), {})


def test_generation_files_are_checked(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0, orig_vocab_size=spec.vocab)
    folder = convert(source, tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 4000]}')
    with pytest.raises(HoldfastError, match="eos_token_id 4000, outside the vocabulary"):
        verify_conversion(source, read_model(source), folder, WritePlan([]), {})

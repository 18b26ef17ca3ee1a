"""Megatron checkpoints of every version and layout become exactly the Hugging Face tensors of the generator's truth."""

import zipfile
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from holdfast import convert
from holdfast.system.errors import HoldfastError
from tests.conversion.megatron_files import Spec, as_huggingface, make_truth, write_megatron

LAYOUTS = [(tp, pp, vpp) for tp, pp, vpp in product((1, 2, 4), (1, 2), (1, 2)) if vpp == 1 or pp > 1]
NAMES = [("ancient", v) for v in (0, 1.0, 2.0, 3.0)] + [("legacy", v) for v in (0, 1.0, 2.0, 3.0)] + [("mcore", 3.0)]


def assert_same(folder, spec, truth):
    found, wanted = load_file(folder / "model.safetensors"), as_huggingface(spec, truth)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize(("names", "version"), NAMES)
def test_every_version_and_layout_is_bit_exact(tmp_path, family, names, version):
    spec = Spec(family=family)
    for tp, pp, vpp in LAYOUTS:
        truth = make_truth(spec, spec.padded(tp))
        place = tmp_path / f"{tp}{pp}{vpp}"
        source = write_megatron(
            place / "megatron", spec, truth, version, tp, pp, vpp, names, zip_form=(tp + pp) % 2 == 0
        )
        assert_same(convert(source, place / "hf", true_vocab_size=spec.vocab), spec, truth)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("groups", [None, 2])
def test_a_llama_type_model_with_grouped_queries_and_gates_is_bit_exact(tmp_path, tp, pp, groups):
    spec = Spec(swiglu=True, groups=groups, dtype=torch.bfloat16)
    truth = make_truth(spec, spec.padded(tp))
    source = write_megatron(tmp_path / "megatron", spec, truth, 3.0, tp, pp, 1, "mcore")
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)


def test_uneven_pipeline_stages_are_counted_from_the_files(tmp_path):
    spec = Spec(layers=5)
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "megatron", spec, truth, 3.0, 1, 3, 1, "mcore", uneven=(1, 2, 2))
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)


def renamed(tree, rename):
    return {rename(key): renamed(value, rename) if isinstance(value, dict) else value for key, value in tree.items()}


def of_2019(model):
    """Flat, without the language_model level."""
    language = model["language_model"]
    tables = {f"{name}.weight": table["weight"] for name, table in language["embedding"].items()}
    return {**tables, **{f"transformer.{name}": tensor for name, tensor in language["transformer"].items()}}


def of_transformer_engine(model):
    """Legacy models on Transformer Engine: norms inside the linear layers behind them."""
    parts = {
        "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
        "self_attention.query_key_value.": "self_attention.layernorm_qkv.",
        "self_attention.dense.": "self_attention.proj.",
        "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
        "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
        "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
        "final_layernorm": "final_norm",
    }

    def rename(name):
        for old, new in parts.items():
            name = name.replace(old, new)
        return name

    return renamed(model, rename) | {"_extra_state": None}


def of_forks(model):
    return renamed(
        model, lambda n: n.replace("input_layernorm", "input_norm").replace("attention_layernorm", "attention_norm")
    )


@pytest.mark.parametrize(
    ("names", "version", "change"),
    [("ancient", 0, of_2019), ("legacy", 3.0, of_transformer_engine), ("legacy", 3.0, of_forks)],
)
def test_names_of_every_epoch_are_understood(tmp_path, names, version, change):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "run", spec, truth, version, names=names)
    path = rank_file(source, "mp_rank_00")
    state = torch.load(path, weights_only=False)
    torch.save({**state, "model": change(state["model"])}, path)
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("zip_form", [True, False])
def test_a_release_zip_without_args_is_read_in_place(tmp_path, compression, zip_form):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    run = write_megatron(tmp_path / "run", spec, truth, 0, names="ancient", args=False, zip_form=zip_form)
    archive = tmp_path / "release.zip"
    top = "megatron_lm_345m/" if zip_form else ""
    with zipfile.ZipFile(archive, "w", compression) as target:
        target.writestr(f"{top}latest_checkpointed_iteration.txt", "release")
        target.write(rank_file(run, "mp_rank_00"), f"{top}release/mp_rank_00/model_optim_rng.pt")
    options = {"true_vocab_size": spec.vocab, "num_attention_heads": spec.heads}
    assert_same(convert(archive, tmp_path / "hf", **options), spec, truth)
    with pytest.raises(HoldfastError, match="--num-attention-heads"):
        convert(archive, tmp_path / "other", true_vocab_size=spec.vocab)
    with pytest.raises(HoldfastError, match=r"true vocabulary size is unknown.*104 rows"):
        convert(archive, tmp_path / "other", num_attention_heads=spec.heads)


def test_a_single_file_is_enough(tmp_path):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    run = write_megatron(tmp_path / "run", spec, truth, 2.0)
    source = run / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)


def test_the_version_flag_overrides_what_the_file_says(tmp_path):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "run", spec, truth, 1.0)
    path = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    del state["checkpoint_version"]  # as the code of September 2020 wrote it
    torch.save(state, path)
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab, checkpoint_version=1.0), spec, truth)


def test_the_tokenizer_type_says_the_true_vocabulary_size(tmp_path):
    spec = Spec(layers=1, hidden=4, heads=1, vocab=50257, multiple=128)
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "run", spec, truth, 3.0, tokenizer_type="GPT2BPETokenizer")
    assert_same(convert(source, tmp_path / "hf"), spec, truth)


def edit(path, change):
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def rank_file(run, name):
    return run / "iter_0000100" / name / "model_optim_rng.pt"


def test_what_does_not_belong_together_is_refused_with_the_culprit(tmp_path):
    spec = Spec()
    truth = make_truth(spec, spec.padded(2))

    def refused(number, change, culprit, **options):
        run = write_megatron(tmp_path / f"run{number}", spec, truth, 3.0, 2, 2)
        change(run)
        with pytest.raises(HoldfastError) as caught:
            convert(run, tmp_path / f"out{number}", **{"true_vocab_size": spec.vocab, **options})
        assert culprit in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value) and not (tmp_path / f"out{number}").exists()

    refused(0, lambda run: rank_file(run, "mp_rank_01_000").unlink(), "tensor rank 1, pipeline stage 0 is missing")

    def older(state):
        state["iteration"] = 90

    refused(
        1,
        lambda run: edit(rank_file(run, "mp_rank_01_001"), older),
        "mp_rank_01_001/model_optim_rng.pt has iteration 90",
    )

    def nudge(state):
        state["model"]["language_model"]["encoder"]["layers.0.input_layernorm.weight"][3] += 1

    refused(
        2,
        lambda run: edit(rank_file(run, "mp_rank_01_000"), nudge),
        "its copy of decoder.layers.0.input_layernorm.weight differs",
    )

    def nudge_head(state):
        state["model"]["word_embeddings_for_head"]["weight"][3, 3] += 1

    refused(3, lambda run: edit(rank_file(run, "mp_rank_00_001"), nudge_head), "copy of the embedding differs")
    refused(4, lambda run: None, "gives 200 tokens, but the embedding has only 112 rows", true_vocab_size=200)

    def other_layers(state):
        state["args"].num_layers = 6

    def all_ranks(change):
        return lambda run: [edit(path, change) for path in run.glob("iter*/*/*.pt")]

    refused(5, all_ranks(other_layers), "decoder.layers.4.input_layernorm.weight")

    def other_width(state):
        state["args"].hidden_size = 20

    refused(6, all_ranks(other_width), "has the shape [112, 16], but the configuration requires [112, 20]")

    def stub(state):
        state["model"]["language_model"]["encoder"]["layers.0.input_layernorm.weight"] = spec

    refused(7, all_ranks(stub), "Spec, where a tensor is expected")

    def residual(state):
        state["args"].apply_residual_connection_post_layernorm = True

    refused(8, all_ranks(residual), "args.apply_residual_connection_post_layernorm = True")

    def more_ranks(state):
        state["args"].tensor_model_parallel_size = 4

    refused(9, all_ranks(more_ranks), "args have tensor_model_parallel_size = 4")

    def extra(state):
        state["model"]["language_model"]["encoder"]["layers.0.self_attention.q_layernorm.weight"] = torch.ones(4)

    refused(10, all_ranks(extra), "this architecture has no decoder.layers.0.self_attention.q_layernorm.weight")


def test_unimportable_objects_do_not_hinder(tmp_path):
    """The enums of a Megatron that is not installed, the famous ModuleNotFoundError."""
    import sys
    import types
    from enum import Enum

    module = types.ModuleType("megatron_of_2021.model.enums")
    module.ModelType = Enum("ModelType", "encoder_or_decoder retro", module="megatron_of_2021.model.enums")
    names = ("megatron_of_2021", "megatron_of_2021.model", "megatron_of_2021.model.enums")
    sys.modules.update(dict.fromkeys(names, module))
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    run = write_megatron(tmp_path / "run", spec, truth, 3.0, model_type=module.ModelType.encoder_or_decoder)
    for name in names:
        del sys.modules[name]
    assert_same(convert(run, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)

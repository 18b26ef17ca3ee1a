"""What goes along with the weights: pipeline args, dropout, generation settings, dict order, tokenizer type."""

import argparse
import json
import re

import pytest
import torch

from holdfast import convert
from holdfast.conversion.command import ConvertOptions
from holdfast.conversion.converting import run_conversion
from holdfast.conversion.megatron.write import stage_sizes
from holdfast.conversion.sources import read_model
from tests.conversion.families import build_family
from tests.conversion.huggingface.test_huggingface import build
from tests.conversion.megatron_files import Spec, make_truth, write_megatron


def load(path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def test_layers_without_a_window_are_a_list_that_torch_loads_safely(tmp_path):
    build_family("qwen2-windows").save_pretrained(tmp_path / "hf")
    megatron = convert(tmp_path / "hf", tmp_path / "megatron", to="megatron")
    assert load(megatron / "release/mp_rank_00/model_optim_rng.pt")["args"].window_attn_skip_freq == [0, 1]


@pytest.mark.parametrize(
    ("layers", "stages"), [(3, 2), (4, 2), (7, 3), (8, 3), (10, 4), (5, 4), (9, 4), (23, 8), (24, 8)]
)
def test_megatron_core_builds_the_stages_that_are_written(layers, stages):
    """Megatron-core's own count of layers per stage, from the args that a checkpoint carries."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    from holdfast.conversion.megatron.args import args_for
    from holdfast.conversion.model import Architecture

    sizes = stage_sizes(layers, stages)
    assert sum(sizes) == layers and min(sizes) > 0 and max(sizes) - layers / stages < 2
    arch = Architecture(
        num_layers=layers, hidden_size=8, num_attention_heads=2, num_query_groups=2, kv_channels=4, ffn_hidden_size=8,
        max_position_embeddings=4, padded_vocab_size=16,
    )  # fmt: skip
    args = args_for(arch, 16, 16, 1, sizes, mcore=True)
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=args["decoder_first_pipeline_num_layers"],
        num_layers_in_last_pipeline_stage=args["decoder_last_pipeline_num_layers"], pipeline_dtype=torch.float32,
    )  # fmt: skip
    assert [get_num_layers_to_build(config, None, rank) for rank in range(stages)] == sizes


def test_an_uneven_pipeline_carries_its_args_and_comes_back(tmp_path):
    spec = Spec(layers=3)
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), orig_vocab_size=spec.vocab)
    folder = convert(source, tmp_path / "out", to="megatron", pipeline_model_parallel_size=2, verify=True)
    args = load(folder / "release/mp_rank_00_001/model_optim_rng.pt")["args"]
    assert (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) == (2, 1)
    assert read_model(folder).architecture.num_layers == 3


def test_a_llama_with_dropout_becomes_hugging_face_with_a_note(tmp_path):
    spec = Spec(swiglu=True, groups=2)
    truth, more = make_truth(spec, spec.padded(1)), {"orig_vocab_size": spec.vocab, "hidden_dropout": 0.1}
    source = write_megatron(tmp_path / "m", spec, truth, names="mcore", **more)
    report = run_conversion(ConvertOptions(source=source, destination=tmp_path / "hf", to="hf", verify=True))
    assert any("hidden_dropout 0.1 left out" in note for note in report.notes)


def test_bert_with_a_fused_gelu_becomes_a_run_with_a_note(tmp_path):
    spec = Spec(family="bert")
    more = {"bias_gelu_fusion": True, "openai_gelu": False, "orig_vocab_size": spec.vocab}
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), **more)
    report = run_conversion(ConvertOptions(source=source, destination=tmp_path / "run", to="holdfast", verify=True))
    assert any("at most 4.8e-4" in note for note in report.notes) and not report.verification["exact"]
    assert report.verification["announced_difference"] < 1e-2


def test_generation_settings_survive_hugging_face_to_hugging_face(tmp_path):
    source = tmp_path / "source"
    build("llama").save_pretrained(source)
    config = json.loads((source / "config.json").read_text()) | {
        "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 3,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 1, "eos_token_id": [2, 7, 9], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.9}
    (source / "generation_config.json").write_text(json.dumps(generation | {"do_sample": True}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ old }}", "eos_token": "<e>"}))
    folder = convert(source, tmp_path / "hf", verify=True)
    assert json.loads((folder / "generation_config.json").read_text()) == generation | {"do_sample": True}
    found = json.loads((folder / "config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"], found["pad_token_id"]) == (1, [2, 7], 3)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_a_byte_level_tokenizer_keeps_its_chat_template(tmp_path):
    source = tmp_path / "source"
    build("gpt2").save_pretrained(source)
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    vocabulary = {f"t{number}": number for number in range(size - 1)} | {"<|endoftext|>": size - 1}
    (source / "vocab.json").write_text(json.dumps(vocabulary))
    (source / "merges.txt").write_text("#version: 0.2\n")
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ x }}"})
    )
    folder = convert(source, tmp_path / "hf", verify=True)
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ x }}"
    assert json.loads((folder / "vocab.json").read_text()) == vocabulary


@pytest.mark.parametrize("kind", ["gpt2", "megatron-bert"])
def test_legacy_files_have_the_order_and_the_type_that_old_readers_need(tmp_path, kind):
    """Old converters take tensors in the order of the dict: the weight of query_key_value before its bias, modules in order."""
    source = tmp_path / "source"
    build(kind).save_pretrained(source)
    folder = convert(source, tmp_path / "m", to="megatron", megatron_names="legacy")
    state = load(folder / "release/mp_rank_00/model_optim_rng.pt")
    wanted = "GPT2BPETokenizer" if kind == "gpt2" else "BertWordPieceLowerCase"
    assert state["args"].tokenizer_type == wanted
    names = list(state["model"]["language_model"]["encoder"])
    first = [re.sub(r"^layers\.0\.", "", name) for name in names if name.startswith("layers.0.")]
    modules = (
        "input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
        "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
    )  # fmt: skip
    assert first == [f"{module}.{part}" for module in modules for part in ("weight", "bias")]
    assert names[-2:] == ["final_layernorm.weight", "final_layernorm.bias"]
    assert next(iter(state["model"]["language_model"])) == "embedding"


def test_a_tokenizer_that_gives_other_ids_fails_the_verification(tmp_path, monkeypatch):
    from holdfast.conversion import converting
    from holdfast.system.errors import HoldfastError

    source = tmp_path / "source"
    build("gpt2").save_pretrained(source)
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    letters = {chr(33 + number): number for number in range(94)}
    vocabulary = letters | {f"t{number}": number for number in range(94, size - 1)} | {"<|endoftext|>": size - 1}
    (source / "vocab.json").write_text(json.dumps(vocabulary))
    (source / "merges.txt").write_text("#version: 0.2\n")
    convert(source, tmp_path / "right", verify=True)
    settle = converting.choose_vocabulary

    def confused(model, options):
        model, tokenizer = settle(model, options)
        text = tokenizer.files["tokenizer.json"].decode().replace('"a":', '"\\u0001":').replace('"e":', '"a":')
        tokenizer.files["tokenizer.json"] = text.replace('"\\u0001":', '"e":').encode()
        return model, tokenizer

    monkeypatch.setattr(converting, "choose_vocabulary", confused)
    with pytest.raises(HoldfastError, match=r"tokenizer\.json gives other ids"):
        convert(source, tmp_path / "wrong", verify=True)

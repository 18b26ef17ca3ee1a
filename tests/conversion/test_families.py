"""Every family against transformers: fp64 logits, greedy text, and the way through every format and back."""

import filecmp
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast import convert, generate
from holdfast.config import read_config
from holdfast.conversion.huggingface.config import architecture_from_config
from holdfast.conversion.model import function_of
from holdfast.conversion.sources import read_model
from holdfast.conversion.train_load import check_same_function
from holdfast.generation.loading import load_model
from holdfast.models.gpt import GPT
from holdfast.system.errors import HoldfastError
from tests.conversion.families import FAMILIES, VOCABULARY, build_family
from tests.conversion.oracles import load_wide
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer
from tests.grids import mostly_slow

LENGTH = 40


def in_double_precision(path):
    """The GPT module of a checkpoint, in fp64."""
    source = read_model(path)
    arch = source.architecture
    gpt = GPT(
        arch.model_config(),
        vocab_size=VOCABULARY,
        padded_vocab_size=arch.padded_vocab_size,
        max_positions=arch.max_position_embeddings,
        dtype=torch.float64,
    )
    with torch.no_grad():
        for name, parameter in gpt.double().named_parameters():
            bits = source.tensors[name].read(0, source.tensors[name].matrix[0])
            parameter.copy_(torch.from_numpy(bits.view("<f8").reshape(parameter.shape).copy()))
    return gpt.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_logits_and_gradients_are_those_of_transformers(tmp_path, family):
    build_family(family, torch.float64).save_pretrained(tmp_path / "hf")
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    oracle, gpt = load_wide(tmp_path / "hf"), in_double_precision(tmp_path / "hf")
    theirs, ours = oracle(ids).logits, gpt.logits(gpt.hidden(ids))
    difference = (ours - theirs).abs().max()
    assert difference < 1e-12 * max(1.0, float(theirs.detach().abs().max())), difference

    # The gradient of the embedding passes through every layer; the loss and attention in blocks have their own backward.
    torch.nn.functional.cross_entropy(theirs[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    counted = torch.ones(ids.shape).index_fill(1, torch.tensor([LENGTH - 1]), 0)
    gpt(ids, ids.roll(-1, 1), counted).backward()
    expected = oracle.model.get_input_embeddings().weight.grad
    found = gpt.embedding.word_embeddings.weight.grad[:VOCABULARY]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(
    "family", mostly_slow(FAMILIES, ["llama-dynamic", "qwen3-windows", "mistral", "gpt-neox", "gemma2"])
)
def test_greedy_text_is_that_of_transformers(tmp_path, family):
    """Prompts and texts that cross sliding windows and original lengths, alone and side by side."""
    model = build_family(family)
    model.save_pretrained(tmp_path / "hf")
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    loaded = load_model(tmp_path / "hf", tokenizer={"vocab_file": vocab, "merge_file": merges})
    texts = ["the quick", "the lazy dog jumps over the other dogs and"]
    prompts = [loaded.tokenizer.encode(text) for text in texts]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        written = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        expected.append(tuple(written[: written.index(0)] if 0 in written else written))
    assert [generate(loaded, text, max_new_tokens=24, temperature=0)[0].tokens for text in texts] == expected
    assert [found.tokens for found in generate(loaded, texts, max_new_tokens=24, temperature=0)] == expected


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama3.1", "qwen2.5-yarn", "gpt-neox", "gemma2"]))
def test_the_way_through_holdfast_and_back_is_equal_to_the_byte(tmp_path, family):
    build_family(family).save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").unlink()  # written again from config.json
    direct = convert(tmp_path / "source", tmp_path / "direct", verify=True)
    run = convert(direct, tmp_path / "run", to="holdfast", verify=True)
    assert_same_folder(convert(run, tmp_path / "back", verify=True), direct)


IN_MEGATRON = [
    "llama2",
    "llama3",
    "llama3.2-tied",
    "llama-linear",
    "qwen2",
    "qwen2.5-yarn",
    "qwen3",
    "qwen2-windows",
    "qwen3-windows",
    "mistral",
    "gpt-neox-serial",
]


@pytest.mark.parametrize("family", mostly_slow(IN_MEGATRON, ["qwen3-windows", "mistral"]))
def test_the_way_through_megatron_and_back_is_equal_to_the_byte(tmp_path, family):
    build_family(family).save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").unlink()
    run = convert(tmp_path / "source", tmp_path / "run", to="holdfast")
    direct = convert(run, tmp_path / "direct")
    options = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    megatron = convert(run, tmp_path / "megatron", to="megatron", verify=True, **options)
    again = convert(megatron, tmp_path / "again", to="holdfast", verify=True)
    assert_same_folder(
        convert(again, tmp_path / "back", to="hf", verify=True),
        direct,
        but=["config.json", "generation_config.json"],
    )
    found, wanted = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "direct"))
    assert found | {"bos_token_id": 0, "eos_token_id": 0} == wanted  # args have no special ids


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama-dynamic", "has use_rope_scaling = False, not True"),
        ("llama3.1", "has original_max_position_embeddings = 8192, not 16"),
        ("llama-yarn", "has yarn_attention_factor = None, not 1.0"),
        ("gpt-neox", "has use_parallel_residual = False, not True"),
        ("gemma2", "geglu = False, not True.*attn_logit_softcapping = 0.0, not 5.0; final_logit_softcapping"),
    ],
)
def test_what_megatron_cannot_say_is_refused_with_the_reason(tmp_path, family, reason):
    build_family(family).save_pretrained(tmp_path / "hf")
    with pytest.raises(HoldfastError, match=reason):
        convert(tmp_path / "hf", tmp_path / "megatron", to="megatron")
    assert not (tmp_path / "megatron").exists()


def test_buffers_in_old_files_of_gpt_neox_are_left_out(tmp_path):
    build_family("gpt-neox").save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf/model.safetensors")
    before = read_model(tmp_path / "hf").tensors.keys()
    prefix = "gpt_neox.layers.0.attention."
    more = {
        "bias": torch.ones(1, 1, 8, 8).tril(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(weights | {prefix + name: tensor for name, tensor in more.items()}, tmp_path / "hf/model.safetensors")
    assert read_model(tmp_path / "hf").tensors.keys() == before


def test_the_output_matrix_of_gpt_neox_has_two_names(tmp_path):
    """transformers 5 saves that of its own code where it is asked not to save the original format."""
    model = build_family("gpt-neox")
    model.save_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "renamed", save_original_format=False)
    assert "lm_head.weight" in load_file(tmp_path / "renamed/model.safetensors")
    for name in ("original", "renamed"):
        convert(tmp_path / name, tmp_path / f"{name}-again", verify=True)
    assert_same_folder(tmp_path / "renamed-again", tmp_path / "original-again")


def assert_same_folder(found, wanted, but=()):
    names = sorted(path.name for path in wanted.iterdir())
    assert names == sorted(path.name for path in found.iterdir())
    same, different, errors = filecmp.cmpfiles(found, wanted, names, shallow=False)
    assert "model.safetensors" in same and set(different) <= set(but) and not errors


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama3", {"attention_bias": True}, "attention_bias without mlp_bias"),
        ("llama3", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = longrope"),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}},
            r"mrope_section = \[1\]",
        ),
        ("llama3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling_factor must be at least 1"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": "8"}}, "factor is '8'"),
        ("llama3", {"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type = \['yarn'\]"),
        ("llama3.1", {"rope_scaling": {"high_freq_factor": 1.0}}, "rope_low_freq_factor must be above 0 and below"),
        (
            "llama3.1",
            {"rope_scaling": {"original_max_position_embeddings": -1}},
            "original_max_position_embeddings is -1",
        ),
        ("gpt-neox", {"rope_parameters": None, "rotary_pct": 0.1}, "rotary_percent 0.1 of a head of 8 is 0"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2-windows", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2-windows", {"layer_types": [[], {}]}, "layer_types"),
        ("llama3", {"attention_bias": []}, "attention_bias without mlp_bias"),
        ("gemma2", {"sliding_window": None}, "layer_types"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = gelu"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "attn_logit_softcapping is 'x'"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("gpt-neox", {"attention_bias": False}, "attention_bias = False"),
        ("gpt-neox", {"hidden_act": "relu"}, "'relu' cannot be converted"),
    ],
)
def test_an_option_that_is_not_understood_is_refused_by_name(tmp_path, family, changes, reason):
    build_family(family).save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | changes))
    with pytest.raises(HoldfastError, match=reason):
        read_model(tmp_path / "hf")


LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "num_attention_heads": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED = {
    "llama2_7b": {
        "model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "rope_scaling": None, "tie_word_embeddings": False,
    },
    "qwen2.5_0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768,
        "max_window_layers": 24,
    },
    "llama3_1b": LLAMA3 | {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "rope_scaling": SCALED | {"factor": 32.0},
        "tie_word_embeddings": True, "head_dim": 64,
    },
    "llama3_8b": LLAMA3 | {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "rope_scaling": SCALED | {"factor": 8.0},
    },
    "qwen3_0.6b": QWEN3 | {
        "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None, "attention_bias": False,
    },
    "qwen3_8b": QWEN3 | {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    },
    "mistral_7b": {
        "model_type": "mistral", "vocab_size": 32000, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
        "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma2_2b": {
        "model_type": "gemma2", "vocab_size": 256000, "num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    },
    "pythia_160m": {
        "model_type": "gpt_neox", "vocab_size": 50304, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "rotary_pct": 0.25,
        "rotary_emb_base": 10000, "use_parallel_residual": True, "hidden_act": "gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_fits_the_published_model(name):
    """`train NAME --load FOLDER` of the published weights is not refused."""
    published = architecture_from_config(PUBLISHED[name], name)[1].model_config()
    check_same_function(read_config(name).model, published, Path(name))
    assert function_of(read_config(name).model).keys() == function_of(published).keys()

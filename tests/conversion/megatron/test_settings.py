"""Megatron's args: each one that reaches the model is understood or refused by name; none is ignored silently."""

import dataclasses

import pytest

from holdfast import convert
from holdfast.conversion.megatron.settings import HARMLESS, HARMLESS_FAMILIES, REFUSED, UNDERSTOOD
from holdfast.conversion.sources import read_model
from holdfast.system.errors import HoldfastError
from tests.conversion.megatron_files import Spec, make_truth, write_megatron

LLAMA = Spec(swiglu=True, groups=2, layers=1)


def write(folder, **args):
    spec = LLAMA
    more = {"orig_vocab_size": spec.vocab, **args}
    return write_megatron(folder, spec, make_truth(spec, spec.padded(1)), names="mcore", **more)


def test_every_field_of_megatron_core_is_classified():
    """A new version of Megatron-core with a new field fails here: decide whether it changes the function."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    known = UNDERSTOOD | REFUSED | HARMLESS
    private = {name for name in fields if name.startswith("_")}
    assert {name for name in fields - known - private if not name.startswith(HARMLESS_FAMILIES)} == set()
    # What only latent attention has is never reached: its switch is refused.
    assert "multi_latent_attention" in REFUSED and dataclasses.fields(MLATransformerConfig)


def test_no_arg_is_classified_twice():
    assert not UNDERSTOOD & REFUSED and not UNDERSTOOD & HARMLESS and not REFUSED & HARMLESS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qk_l2_norm", True), ("no_rope_freq", 4), ("no_rope_freq", [1, 0]), ("activation_func_clamp_value", 7.0),
        ("glu_linear_offset", 1.0), ("use_mup", True), ("softmax_scale", 0.5), ("softmax_type", "off-by-one"),
        ("window_size", (128, 4)), ("attention_output_gate", True),
        ("experimental_attention_variant", "dsa"), ("linear_attention_freq", 4), ("layernorm_zero_centered_gamma", True),
        ("heterogeneous_layers_config_path", "x.json"), ("rotary_interleaved", True),
        ("mtp_num_layers", 1), ("num_experts", 8), ("multi_latent_attention", True), ("quick_geglu", True),
        ("enable_mhc_connections", True), ("is_hybrid_model", True),
        ("position_embedding_type", "mrope"), ("normalization", "LayerNorm1p"),
    ],
)  # fmt: skip
def test_an_arg_that_changes_the_function_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(HoldfastError, match=rf"args\.{name} = .* changes the function"):
        read_model(write(tmp_path / "m", **{name: value}))


def test_yarn_without_its_factor_is_refused(tmp_path):
    args = {"position_embedding_type": "yarn", "yarn_mscale": 2.0, "yarn_mscale_all_dim": 1.0}
    args |= {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_original_max_position_embeddings": 8}
    with pytest.raises(HoldfastError, match="rope_scaling_factor must be at least 1"):
        read_model(write(tmp_path / "m", **args))


@pytest.mark.parametrize("multiple", [0, -8, 1 << 30])
def test_a_multiple_of_the_vocabulary_that_is_out_of_range_is_refused(tmp_path, multiple):
    source = write(tmp_path / "m")
    with pytest.raises(HoldfastError, match="make_vocab_size_divisible_by"):
        convert(source, tmp_path / "out", to="megatron", make_vocab_size_divisible_by=multiple)


@pytest.mark.parametrize(("skip", "found"), [(2, (2,)), (None, ())])
def test_layers_without_the_window_are_read(tmp_path, skip, found):
    read = read_model(write(tmp_path / "m", window_size=(4, 0), window_attn_skip_freq=skip)).architecture
    assert read.window_attn_skip_freq == found


@pytest.mark.parametrize("skip", [0, -2, [1, 2], [1], "2"])
def test_other_values_of_window_attn_skip_freq_are_refused(tmp_path, skip):
    with pytest.raises(HoldfastError, match=r"args\.window_attn_skip_freq = "):
        read_model(write(tmp_path / "m", window_size=(4, 0), window_attn_skip_freq=skip))


def test_an_unknown_arg_is_refused_unless_the_user_ignores_it(tmp_path):
    source = write(tmp_path / "m", twist_layers=3, other_switch=False, nothing=None, none_of_them=[])
    with pytest.raises(HoldfastError, match=r"twist_layers = 3 .* --ignore-args twist_layers"):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", ignore_args=("twist_layers",))
    assert "args.twist_layers = 3 ignored (--ignore-args)" in read_model(source, ignored=["twist_layers"]).notes


def test_args_of_training_and_layout_pass(tmp_path):
    values = dict.fromkeys(HARMLESS, 1) | {f"{family}_x": "y" for family in HARMLESS_FAMILIES}
    values |= dict.fromkeys(REFUSED, None) | {"softmax_type": "vanilla", "glu_linear_offset": 0.0}
    values = {name: value for name, value in values.items() if name not in ("spec", "iteration")}  # our writer's own
    assert read_model(write(tmp_path / "m", **values)).architecture.activation == "swiglu"


def test_contradictions_between_flags_args_and_tensors_are_refused(tmp_path):
    with pytest.raises(HoldfastError, match="--num-attention-heads 2 contradicts .* 4 heads"):
        convert(write(tmp_path / "m"), tmp_path / "out", num_attention_heads=2)
    with pytest.raises(HoldfastError, match="padded_vocab_size is 96, but the embedding has 104 rows"):
        read_model(write(tmp_path / "n", padded_vocab_size=96))

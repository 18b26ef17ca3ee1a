"""Configuration: file, flags and dataclasses are three views of the same keys."""

import tomllib
from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest

from holdfast.config import Config, all_keys, config_from_tables, config_keys, config_to_toml, read_config
from holdfast.system.errors import UsageError
from holdfast.system.field_docs import field_docs
from holdfast.system.other_names import MIXTURE_OF_EXPERTS, NOT_NEEDED, SAME_MEANING, own_name


def test_the_printed_file_reloads_to_the_same_config(tmp_path):
    config = Config()
    config = replace(config, data=replace(config.data, data_path=("0.3", 'a "quoted" \\ path', "0.7", "b")))
    config = replace(config, train=replace(config.train, rampup_batch_size=(4, 4, 100), save="runs/ü"))
    path = tmp_path / "config.toml"
    for comments in (True, False):
        path.write_text(config_to_toml(config, comments=comments))
        assert read_config(path) == config


def test_every_key_is_unique_across_sections_and_has_a_help_text():
    keys = [key for keys in config_keys().values() for key in keys]
    assert len(keys) == len(set(keys))
    for section in fields(Config):
        helps = field_docs(type(getattr(Config(), section.name)))
        assert all(len(text) > 10 for text in helps.values()), helps


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[model]\nnum_layer = 3", "perhaps you meant 'num_layers'"),
        ("[model]\nlr = 3.0", "it belongs in [optimizer]"),
        ("[modell]\nnum_layers = 3", "unknown section [modell]; perhaps you meant 'model'"),
        ("num_layers = 3", "num_layers is outside of any section; it belongs in [model]"),
        ("num_layer = 3", "unknown key 'num_layer'; perhaps you meant 'num_layers'"),
        ("[num_layers]\nvalue = 3", "num_layers is a key, not a section; write num_layers = ... under [model]"),
        ("model = 3", "model is a section; write [model] and its keys below"),
        ("[model]\nnum_layers = '3'", "expected int, found str"),
        ("[model]\nnum_layers = true", "expected int, found bool"),
        ("[model]\nnormalization = 'BatchNorm'", "choose one of LayerNorm, RMSNorm"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_way_out(toml, said):
    with pytest.raises(UsageError) as caught:
        config_from_tables(tomllib.loads(toml), source="x.toml")
    assert said in str(caught.value)


def test_train_accepts_every_tokenizer_type_that_preprocess_accepts():
    from holdfast.data.preprocess.options import PreprocessOptions

    for name in get_args(get_type_hints(PreprocessOptions)["tokenizer_type"]):
        assert config_from_tables({"data": {"tokenizer_type": name}}, "test").data.tokenizer_type == name


def test_use_distributed_optimizer_is_another_name_of_a_sharding_strategy():
    config = config_from_tables({"parallel": {"use_distributed_optimizer": True}}, "file")
    assert config.parallel.data_parallel_sharding_strategy == "optim"
    again = tomllib.loads(config_to_toml(config))
    assert config_from_tables(again, "file") == config
    # A run that was started with the name can be continued without it.
    replicated = replace(config.parallel, data_parallel_sharding_strategy="no_shard")
    assert replicated.data_parallel_sharding_strategy == "no_shard"
    sharded = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    config = config_from_tables({"parallel": sharded}, "file")
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"


def test_a_key_of_another_program_is_answered_with_the_own_one():
    for table, message in (
        ({"model": {"n_layer": 4}}, "unknown key 'n_layer' in [model]; here it is num_layers in [model]"),
        ({"train": {"learning_rate": 1e-3}}, "; here it is lr in [optimizer]"),
        ({"train": {"use_flash_attn": True}}, "; leave it out: what it switches on is chosen or done in any case"),
        ({"max_iters": 4}, "c.toml: unknown key 'max_iters'; here it is train_iters in [train]"),
    ):
        with pytest.raises(UsageError) as caught:
            config_from_tables(table, "c.toml")
        assert str(caught.value).endswith(message)


def test_every_name_of_another_program_leads_to_a_key_and_is_none_itself():
    assert {own_name(name)[0] for name in SAME_MEANING} <= set(all_keys())
    assert not (set(SAME_MEANING) | NOT_NEEDED | MIXTURE_OF_EXPERTS) & set(all_keys())

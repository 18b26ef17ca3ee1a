"""Learning rates of single parameters: patterns, errors, and steps against one torch optimizer per parameter."""

from dataclasses import replace

import pytest
import torch

from holdfast.checkpoint import State
from holdfast.config import Config, ModelConfig, OptimizerConfig
from holdfast.models.gpt import GPT
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.train.checks.bounds import check_bounds
from holdfast.train.learning_rates import check_rates, group_schedules, matches, parse_factors, set_rates
from holdfast.train.muon import Muon
from holdfast.train.optim import build_optimizer, clip_and_step
from holdfast.train.schedule import LearningRateSchedule

NAMES = [
    "embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.bias",
    "decoder.layers.11.mlp.linear_fc1.weight", "decoder.layers.11.input_layernorm.weight", "output_layer.weight",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embedding", [0, 1]), ("layers.1", [2]), ("layers.1*", [2, 3, 4]), ("*layernorm", [4]), ("weight", [0, 1, 3, 4, 5]),
        ("layers.*.bias", [2]), ("decoder.layers.11.mlp.linear_fc1.weight", [3]), ("embed", []), ("mlp.linear", []),
        ("*", range(6)),
    ],
)  # fmt: skip
def test_a_pattern_matches_whole_parts_of_a_name(pattern, matched):
    assert [index for index, name in enumerate(NAMES) if matches(pattern, name)] == list(matched)


@pytest.mark.parametrize(
    "text", ["embedding", "embedding=", "=2", "embedding=x", "embedding=-1", "a=1,,b=2", "a=nan", "a=inf"]
)
def test_a_malformed_list_is_explained(text):
    with pytest.raises(UsageError, match="PATTERN=FACTOR"):
        parse_factors(text)


def test_a_pattern_without_a_parameter_of_its_own_is_refused():
    check_rates(OptimizerConfig(lr_mult="embedding=0.1,weight=2"), NAMES)
    with pytest.raises(HoldfastError, match=r"'embed' matches no parameter\. .* embedding\.word_embeddings\.weight"):
        check_rates(OptimizerConfig(lr_mult="embed=0.1"), NAMES)
    with pytest.raises(HoldfastError, match="'embedding' matches no parameter that an earlier pattern leaves"):
        check_rates(OptimizerConfig(lr_mult="weight=2,embedding=0.1"), NAMES)


def test_a_decoupled_floor_above_its_peak_and_one_without_a_peak_are_refused():
    options = OptimizerConfig(lr=1.0, min_lr=0.1)
    for changes in ({"decoupled_lr": 0.05}, {"decoupled_lr": 0.5, "decoupled_min_lr": 0.6}, {"decoupled_min_lr": 0.1}):
        with pytest.raises(UsageError, match="--decoupled-min-lr"):
            check_bounds(Config(optimizer=replace(options, **changes)))
    check_bounds(Config(optimizer=replace(options, decoupled_lr=0.5)))


def model_with_gradients(step: int = 0, model: GPT | None = None) -> GPT:
    torch.manual_seed(step)
    if model is None:
        config = ModelConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, untie_embeddings_and_output_weights=True
        )
        model = GPT(config, vocab_size=32, padded_vocab_size=32, max_positions=8)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_each_parameter_steps_as_under_an_optimizer_of_its_own_with_its_rate(kind):
    """Over a decaying schedule, against torch's AdamW (and this package's Muon, which has its own oracle) per parameter."""
    options = OptimizerConfig(
        optimizer=kind,
        lr=0.1,
        min_lr=0.01,
        weight_decay=0.3,
        lr_mult="layers.1=0,mlp=2.5,*layernorm=0.5",
        decoupled_lr=0.03,
    )
    factors = {"decoder.layers.1": 0.0, ".mlp.": 2.5, "layernorm": 0.5}
    schedule = LearningRateSchedule("linear", 0.1, 0.01, 0, 10, 0, "linear", 1.0)
    model, other = model_with_gradients(), model_with_gradients()
    ours = build_optimizer([model], options, torch.float32)
    schedules = group_schedules(ours, schedule)
    oracles = {}
    for name, parameter in other.named_parameters():
        group = {"params": [parameter], "weight_decay": 0.3 if parameter.ndim == 2 else 0.0}
        matrix = kind == "muon" and ".layers." in name and parameter.ndim == 2
        oracles[name] = Muon([{**group, "muon": True}]) if matrix else torch.optim.AdamW([group], foreach=False)
    for step in range(4):
        set_rates(ours, schedules, step)
        clip_and_step(ours, torch.tensor(1.0), 0.0, 1.0)
        for name, oracle in oracles.items():
            factor = next((factor for part, factor in factors.items() if part in name), 1.0)
            peak, floor = (0.03, 0.01) if name in (NAMES[0], NAMES[-1]) else (0.1, 0.01)
            oracle.param_groups[0]["lr"] = factor * (floor + (1 - step / 10) * (peak - floor))
            oracle.step()
        model_with_gradients(step + 1, model)
        model_with_gradients(step + 1, other)
    initial = dict(model_with_gradients().named_parameters())
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(one, initial[name]) == (".layers.1." in name), name


def test_a_checkpoint_records_the_rates_and_the_next_start_follows_its_own_flags():
    schedule = LearningRateSchedule("constant", 0.1, 0.01, 0, 10, 0, "linear", 1.0)
    before, after = (model_with_gradients() for _ in range(2))
    saved = build_optimizer([before], OptimizerConfig(lr=0.1, min_lr=0.01, lr_mult="embedding=0.5"), torch.float32)
    set_rates(saved, group_schedules(saved, schedule), 3)
    settings = State(before, saved).optimizer_settings()
    recorded = {name: entry["settings"] for entry in settings for name in entry["parameters"]}
    assert (recorded[NAMES[0]]["lr"], recorded[NAMES[0]]["max_lr"], recorded[NAMES[0]]["min_lr"]) == (0.05, 0.05, 0.005)
    assert recorded["output_layer.weight"]["lr"] == 0.1
    loaded = build_optimizer([after], OptimizerConfig(lr=0.1, min_lr=0.01, lr_mult="embedding=3,mlp=2"), torch.float32)
    schedules = group_schedules(loaded, schedule)
    State(after, loaded).apply_optimizer_settings(settings)
    set_rates(loaded, schedules, 4)
    names = {id(parameter): name for name, parameter in after.named_parameters()}
    for group in loaded.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            factor = 3 if name.startswith("embedding") else 2 if ".mlp." in name else 1
            assert group["lr"] == group["max_lr"] == pytest.approx(0.1 * factor), name
            assert group["weight_decay"] == (0.01 if parameter.ndim == 2 else 0.0), name

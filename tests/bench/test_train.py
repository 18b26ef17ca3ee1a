"""`bench train` and `bench generate` measure every contender, on models small enough for a test."""

from dataclasses import replace

import pytest
import torch

from holdfast.bench import generate, train
from holdfast.bench.generate import GenerateBench
from holdfast.bench.phases import PhaseClock, median_phases
from holdfast.bench.plain_gpt import PlainGPT, PlainShape
from holdfast.bench.train import TrainBench
from holdfast.config import Config, DataConfig, ModelConfig, TrainConfig, config_to_toml, read_config
from holdfast.system.errors import UsageError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=100, openai_gelu=True)
    file = tmp_path_factory.mktemp("bench") / "tiny.toml"
    tiny = Config(model=model, data=DataConfig(seq_length=16), train=TrainConfig(micro_batch_size=2))
    file.write_text(config_to_toml(tiny))
    return file


def test_training_is_measured_beside_both_peers_with_the_steps_phases(config):
    speeds, phases = train.run(TrainBench(config=config, steps=2, rounds=2)).values()
    assert [row["contender"] for row in speeds] == ["holdfast", "nanogpt", "hf"]
    for row in speeds:
        assert row["tokens/s"] == pytest.approx(32 / row["step ms"] * 1e3, rel=0.05) and row["MFU"] == "unknown"
        assert row["first step s"] > 0 and 4 < row["loss"] < 5  # near ln 100: all of them learn the same task
    assert {"data ms", "forward ms", "backward ms", "communication ms", "optimizer ms"} <= phases[0].keys()


def test_bert_is_measured_beside_hugging_face(config):
    bert = replace(read_config(config).model, model_type="bert", bert_variant="original", openai_gelu=False)
    config.with_name("bert.toml").write_text(config_to_toml(replace(read_config(config), model=bert)))
    speeds, _ = train.run(TrainBench(config=config.with_name("bert.toml"), steps=1, rounds=1)).values()
    assert [row["contender"] for row in speeds] == ["holdfast", "hf"]
    for row in speeds:
        assert 4.5 < row["loss"] < 6.5  # ln 100 + ln 2, more or less


def test_llama_is_measured_without_the_baseline_that_computes_another_function(config, capsys):
    sizes = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "disable_bias_linear": True}
    llama = replace(read_config(config).model, ffn_hidden_size=32, **sizes)
    config.with_name("llama.toml").write_text(config_to_toml(replace(read_config(config), model=llama)))
    speeds, _ = train.run(TrainBench(config=config.with_name("llama.toml"), steps=1, rounds=1)).values()
    assert [row["contender"] for row in speeds] == ["holdfast", "hf"]
    assert "nanogpt is left out: it has GPT-2's layers only" in capsys.readouterr().err


def test_generation_is_measured_at_every_batch_size(config):
    options = GenerateBench(config=config, batch_sizes=(1, 3), prompt_tokens=4, new_tokens=3, rounds=1)
    (rows,) = generate.run(options).values()
    assert [(row["batch"], row["contender"]) for row in rows] == [
        (1, "holdfast"),
        (1, "hf"),
        (3, "holdfast"),
        (3, "hf"),
    ]
    assert all(row["tokens/s"] > 0 for row in rows)


def test_numbers_below_one_are_refused(config):
    for wrong in ({"batch_sizes": (1, 0)}, {"new_tokens": 0}, {"rounds": -1}):
        with pytest.raises(UsageError, match="give 1 or more"):
            generate.run(GenerateBench(config=config, **wrong))


def test_a_contender_that_does_not_exist_is_named(config):
    with pytest.raises(UsageError, match="there is no contender 'hope'; there are: nanogpt, hf"):
        train.run(TrainBench(config=config, against=("hope",)))
    with pytest.raises(UsageError, match="there is no contender 'hope'; there are: hf, hf-static, vllm"):
        generate.run(GenerateBench(config=config, against=("hope",)))


def test_phases_add_up_by_name():
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("forward", "backward", "forward", "backward", "end"):
        clock(phase)
    assert clock.milliseconds().keys() == {"forward", "backward"} and clock.milliseconds() == {}
    assert median_phases([{"a": 1.0, "b": 5.0}, {"a": 2.0}, {"a": 9.0}]) == {"a": 2.0, "b": 0.0}


def test_the_plain_baseline_is_causal_and_gives_the_mean_cross_entropy():
    torch.manual_seed(1)
    model = PlainGPT(PlainShape(layers=2, width=16, heads=2, positions=8, vocabulary=50))
    tokens = torch.randint(0, 50, (3, 8))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    labels = torch.randint(0, 50, (3, 8))
    labels[:, -1] = -100  # not counted: only what the last token can see has changed
    assert torch.equal(model(tokens, labels), model(changed, labels))
    assert model(tokens, labels).item() == pytest.approx(3.9, abs=0.2)

"""What a later start of a run takes from its configuration, and what from the state that it loads."""

from dataclasses import replace

import pytest
import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.checkpoint.state import State
from holdfast.config import ModelConfig, OptimizerConfig, ParallelConfig
from holdfast.models.gpt import GPT
from holdfast.system.errors import HoldfastError
from holdfast.train.optim import GroupSettings, build_optimizer, clip_and_step
from tests.corpus import write_dataset
from tests.distributed.test_layouts import tiny, train_on


def stepped(options: OptimizerConfig) -> tuple[GPT, torch.optim.Optimizer, GroupSettings]:
    """A model, its optimizer after one step, and the settings of the optimizer."""
    torch.manual_seed(1)
    model = GPT(
        ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2),
        vocab_size=32,
        padded_vocab_size=32,
        max_positions=8,
    )
    optimizer = build_optimizer([model], options, torch.float32)
    settings = GroupSettings(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    clip_and_step(optimizer, torch.tensor(1.0), 1.0, 1.0)
    return model, optimizer, settings


def test_settings_of_the_optimizer_are_those_of_the_configuration():
    before, saved, _ = stepped(OptimizerConfig(weight_decay=0.1, adam_beta2=0.9, adam_eps=1e-3, lr_mult="mlp=2"))
    model, optimizer, settings = stepped(OptimizerConfig(weight_decay=0.3, adam_beta2=0.99, adam_eps=1e-6))

    def described() -> list[dict[str, object]]:
        hidden = ("params", "lr")
        return [{key: value for key, value in group.items() if key not in hidden} for group in optimizer.param_groups]

    expected = described()
    State(model, optimizer).apply_optimizer_settings(State(before, saved).optimizer_settings())
    assert described() != expected
    settings.apply()
    assert described() == expected and {group["weight_decay"] for group in expected} == {0.0, 0.3}


@pytest.mark.parametrize(("kind", "other"), [("adam", "muon"), ("muon", "adam"), ("lamb", "muon")])
def test_the_state_of_another_optimizer_is_refused(kind, other):
    model, optimizer, settings = stepped(OptimizerConfig(optimizer=other))
    settings.check_state(other)
    theirs, saved, _ = stepped(OptimizerConfig(optimizer=kind))
    for (_, parameter), (_, source) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        optimizer.state[parameter] = dict(saved.state[source])
    State(model, optimizer).apply_optimizer_settings(State(theirs, saved).optimizer_settings())
    with pytest.raises(HoldfastError, match=f"that of another optimizer than {other} .*--load RUN --no-load-optim"):
        settings.check_state(other)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_continues_with_other_decay_and_not_with_another_kind_of_optimizer(tmp_path):
    config = tiny(write_dataset(tmp_path / "corpus"), tmp_path / "run")
    config = replace(config, train=replace(config.train, train_iters=2, eval_interval=0))
    train_on(1, config, ParallelConfig())
    longer = replace(config, train=replace(config.train, train_iters=4))
    with pytest.raises(AssertionError, match="the saved state is that of another optimizer than muon"):
        train_on(1, replace(longer, optimizer=replace(config.optimizer, optimizer="muon")), ParallelConfig())
    train_on(1, replace(longer, optimizer=replace(config.optimizer, weight_decay=0.7)), ParallelConfig())
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 4
        decays = {entry["settings"]["weight_decay"] for entry in checkpoint.manifest.optimizer_settings}
    assert decays == {0.0, 0.7}

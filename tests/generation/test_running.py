"""`generate` from a run that trains: the newest state, in memory or on disk, copied while training overwrites the slots."""

import threading
from dataclasses import asdict

import pytest
import torch

from holdfast import generate
from holdfast.config import read_config
from holdfast.generation.loading import load_model
from holdfast.snapshot import Snapshots
from holdfast.snapshot.memory.held_weights import newest_weights
from holdfast.snapshot.memory.slot import READY
from tests.conversion.holdfast_runs import GPT2_TINY, VOCABULARY, build_gpt
from tests.generation.conftest import write_model
from tests.snapshot.harness import memory_folder


@pytest.fixture
def training(tmp_path):
    """A run with a checkpoint of step 7, and the snapshots of a trainer that goes on from it."""
    saved = write_model(tmp_path / "model", GPT2_TINY)
    with memory_folder() as memory:
        toml = saved.run / "config.toml"
        toml.write_text(toml.read_text().replace('"/dev/shm"', f'"{memory}"'))
        config = read_config(toml)
        assert config.snapshot.snapshot_dir == str(memory)
        model = build_gpt(GPT2_TINY)
        snapshots = Snapshots(
            "run", model, folder=saved.run, memory=memory, listen_to_signals=False,
            padded_rows={"embedding.word_embeddings.weight": VOCABULARY},
            shared={"config": asdict(config), "true_vocab_size": VOCABULARY},
        )  # fmt: skip
        snapshots.restore()
        yield saved, model, snapshots
        snapshots.close()


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_the_newest_state_in_memory_is_used_and_damage_leads_to_the_checkpoint(training, capsys):
    saved, model, snapshots = training
    before = generate(saved.run, "the quick", max_new_tokens=8, temperature=0)
    assert before == generate(saved.huggingface, "the quick", max_new_tokens=8, temperature=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    snapshots.take(9)
    snapshots.commit()
    loaded = load_model(saved.run)
    assert f"step 9 of {saved.run} from its memory snapshot" in capsys.readouterr().err
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert generate(saved.run, "the quick", max_new_tokens=8, temperature=0) != before
    arena = snapshots.allocator.arena
    (index,) = [i for i, header in enumerate(arena.headers()) if header.state == READY and header.step == 9]
    slot = arena.slot(index)
    slot.payload[slot.layout(slot.header()).starts[0]] ^= 1
    assert generate(saved.run, "the quick", max_new_tokens=8, temperature=0) == before
    assert "is damaged; the snapshot in memory is not used" in capsys.readouterr().err
    slot.payload[slot.layout(slot.header()).starts[0]] ^= 1


def test_weights_are_of_one_step_while_training_overwrites_the_slots(training):
    saved, model, snapshots = training
    memory = read_config(saved.run / "config.toml").snapshot.snapshot_dir
    ended = threading.Event()
    mixed, steps = [], set()

    def read():
        while not ended.is_set():
            weights = newest_weights(saved.run, memory)
            if weights is not None and weights.step > 7:
                values = {float(v) for name in weights.tensors for v in set(weights.tensor(name).flat)}
                steps.add(weights.step)
                if values != {float(weights.step)}:
                    mixed.append((weights.step, values))

    reader = threading.Thread(target=read)
    fill(model, 8)
    snapshots.take(8)
    snapshots.commit()
    reader.start()
    for step in range(9, 150):
        fill(model, step)
        snapshots.take(step)
        snapshots.commit()
    ended.set()
    reader.join(60)
    assert not mixed and steps

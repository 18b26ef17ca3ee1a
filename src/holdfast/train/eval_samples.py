"""`--eval-samples N`: texts that the model in training generates at each evaluation, in samples.jsonl and in the log.

Rank 0 collects the weights from the ranks of one replica, tensor by tensor, into a second model in the type of the activations,
and generates with the engine of `holdfast generate`; other ranks wait at their next collective. The invariant: training stays
bit-identical. Nothing of it changes: the weights are copied, and the random generators are put back.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state import clean_name
from holdfast.config import Config
from holdfast.models.gpt import GPT
from holdfast.parallel.layout import padded_vocab_size
from holdfast.parallel.mesh import Grid
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import BufferedJournal
from holdfast.system.progress import log
from holdfast.train.checks.eval_prompts import read_prompts
from holdfast.train.checks.preflight import tokenizer_of
from holdfast.train.model_families import BatchFeed, build_stage, compute_dtype

# Tokens of a prompt from the validation data, and of what the model writes after a prompt.
PROMPT_TOKENS, NEW_TOKENS = 32, 64
SHOWN_CHARACTERS = 300


class EvalSamples:
    """The samples of one run. All ranks construct it and call `write`."""

    def __init__(self, config: Config, grid: Grid, stages: Sequence[nn.Module], feed: BatchFeed) -> None:
        assert config.train.save is not None
        self._config, self._grid, self._stages, self._feed = config, grid, stages, feed
        self._journal = BufferedJournal(Path(config.train.save) / "samples.jsonl") if grid.rank == 0 else None
        self._tokenizer = tokenizer_of(config) if grid.rank == 0 else None
        self._prompts: list[str] = []

    @torch.no_grad()
    def write(self, step: int) -> None:
        """Generates and records the samples of one step. Collective."""
        cuda = self._grid.device.type == "cuda"
        with torch.random.fork_rng([self._grid.device] if cuda else []):
            model = self._empty_model() if self._grid.rank == 0 else None
            parameters = dict(model.named_parameters()) if model is not None else {}
            for name, weight in collect_weights(self._config, self._grid, self._stages):
                parameters[name].copy_(weight)
            if model is not None:
                self._generate(model, step)

    def close(self) -> None:
        if self._journal:
            self._journal.close()

    def _empty_model(self) -> GPT:
        """The whole model, on the CPU where the device has no memory for a second one."""
        from holdfast.generation.loading import NoInitialization

        config, devices = self._config, [self._grid.device, torch.device("cpu")]
        assert config.model.vocab_size is not None and self._tokenizer is not None
        for device in devices:
            try:
                with device, NoInitialization():
                    return GPT(
                        config.model,
                        vocab_size=min(config.model.vocab_size, self._tokenizer.vocab_size),
                        padded_vocab_size=padded_vocab_size(
                            config.model.vocab_size, config.model, self._grid.layout.tensor
                        ),
                        max_positions=config.model.max_position_embeddings or config.data.seq_length,
                        dtype=compute_dtype(config),
                    ).to(compute_dtype(config))
            except torch.OutOfMemoryError:
                log(f"warning: {device} has no memory for the model that writes samples; generating on the CPU")
        raise AssertionError("the CPU raises another error")

    def _generate(self, model: GPT, step: int) -> None:
        """A failure costs the samples of this step only."""
        from holdfast.generation.engine import generate
        from holdfast.generation.loading import LoadedModel, arrange_for_vectors

        config = self._config
        assert self._tokenizer is not None and self._journal is not None
        positions = config.model.max_position_embeddings or config.data.seq_length
        loaded = LoadedModel(arrange_for_vectors(model.eval()), self._tokenizer, positions)
        self._prompts = self._prompts or self._choose_prompts()
        wanted = [self._prompts[number % len(self._prompts)] for number in range(config.train.eval_samples)]
        room = positions - max(len(loaded.encode(prompt)) for prompt in wanted)
        try:
            found = generate(loaded, wanted, max_new_tokens=min(NEW_TOKENS, room), seed=config.train.seed)
        except (HoldfastError, torch.OutOfMemoryError) as error:
            log(f"warning: no samples of step {step}: {error}")
            return
        now = round(time.time(), 3)
        for one in found:
            texts = {"prompt": one.prompt, "completion": one.completion, "text": one.text}
            self._journal.write({"time": now, "step": step, **texts})
            shown = " ".join(f"{one.prompt}«{one.completion}»".split())
            log(f"  sample: {shown if len(shown) <= SHOWN_CHARACTERS else shown[: SHOWN_CHARACTERS - 1] + '…'}")

    def _choose_prompts(self) -> list[str]:
        """Of --eval-prompts, or the beginnings of the first validation samples, or the beginning of a document."""
        config, feed = self._config, self._feed
        if config.train.eval_prompts:
            return read_prompts(config.train.eval_prompts)
        if not feed.has_validation:
            return [""]
        assert config.train.global_batch_size is not None and self._tokenizer is not None
        length = min(PROMPT_TOKENS, config.data.seq_length // 2)
        rows = torch.cat([micro.x for micro in feed.validation(0, config.train.global_batch_size)])
        return [self._tokenizer.decode(row) for row in rows[:, :length].tolist()]


def collect_weights(config: Config, grid: Grid, stages: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The name and whole value of each weight, on rank 0; nothing on other ranks. Collective: run it to its end."""
    layout = grid.layout
    assert config.model.vocab_size is not None
    for number in range(layout.pipeline * layout.virtual):
        turn, place = divmod(number, layout.pipeline)
        sender = place * (layout.world // layout.pipeline)
        if grid.index("pipeline") == place:
            for raw, parameter in stages[turn].named_parameters():
                weight = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                if grid.rank == sender == 0:
                    yield clean_name(raw), weight
                elif grid.rank == sender:
                    dist.send(weight.contiguous().cpu(), 0)
        elif grid.rank == 0:
            for name, parameter in build_stage(
                config, number, layout.tensor, config.model.vocab_size
            ).named_parameters():
                received = torch.empty(parameter.shape, dtype=torch.float32)
                dist.recv(received, sender)
                yield name, received

"""What differs between model families, for a loop that does not: building stages, making samples, feeding micro batches."""

import functools

import torch
from torch import nn

from holdfast.config import Config
from holdfast.data.gpt_samples import build_gpt_splits
from holdfast.data.loader import Batches, DocumentRules, MicroBatch
from holdfast.errors import HoldfastError
from holdfast.models.gpt import GPT
from holdfast.models.initial import initial_value
from holdfast.parallel.cut import cut_and_fill
from holdfast.parallel.layout import padded_vocab_size, stage_layers
from holdfast.parallel.mesh import Grid
from holdfast.train.preflight import tokenizer_of
from holdfast.train.schedule import batches_of
from holdfast.train.step import PassInputs


def compute_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.train.bf16 else torch.float16 if config.train.fp16 else torch.float32


def build_parts(config: Config, grid: Grid, vocab_size: int) -> list[nn.Module]:
    """The pipeline stages of this rank, cut and filled: one module, or several when stages are interleaved."""
    stages = stage_layers(config.model, config.parallel)
    mine = range(grid.index("pipeline"), len(stages), grid.layout.pipeline)
    parts: list[nn.Module] = []
    dtype = compute_dtype(config)
    compiled = config.train.compile if config.train.compile is not None else grid.device.type == "cuda"
    for stage in mine:
        with torch.device("meta"):
            part = GPT(
                config.model,
                vocab_size=vocab_size,
                padded_vocab_size=padded_vocab_size(vocab_size, config.model, grid.layout.tensor),
                max_positions=config.model.max_position_embeddings or config.data.seq_length,
                dtype=dtype,
                layers=stages[stage],
                is_first=stage == 0,
                is_last=stage == len(stages) - 1,
            )
        cut_and_fill(
            part,
            grid,
            functools.partial(initial_value, config=config.model, seed=config.train.seed, vocab_size=vocab_size),
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.train.recompute_granularity,
            compiled=compiled,
            dtype=dtype,
        )
        parts.append(part)
    return parts


def gpt_inputs(micro: MicroBatch, masked: bool, device: torch.device) -> PassInputs:
    """A GPT micro batch as arguments of the stages."""
    counted = micro.loss_mask.sum() if masked else None
    here = micro.to(device)
    everywhere = {}
    if here.position_ids is not None:
        everywhere["positions_BT"] = here.position_ids
    if here.document_ids is not None:
        everywhere["documents_BT"] = here.document_ids
    at_loss = {"labels_BT": here.labels, **({"loss_mask_BT": here.loss_mask} if masked else {})}
    return PassInputs(here.tokens, everywhere, at_loss, counted)


class Feed:
    """This rank's micro batches of any step: a pure function of how many samples were consumed."""

    def __init__(self, config: Config, grid: Grid) -> None:
        train, data = config.train, config.data
        self._device, self._masked = grid.device, data.eod_mask_loss
        batches = batches_of(config, grid.layout.data)
        iterations = batches.iterations(train.train_iters)
        evaluations = iterations // train.eval_interval if train.eval_interval else 0
        wanted = (batches.total_samples, evaluations * train.eval_iters * batches.full, 0)
        splits = build_gpt_splits(data.data_path, data.split, data.seq_length, train.seed, wanted, data.data_cache_path)
        tokenizer = tokenizer_of(config)
        rules = DocumentRules(
            tokenizer.eod if tokenizer else None,
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
        )
        if splits[0] is None:
            raise HoldfastError(f"split '{data.split}' leaves no documents for training")
        loaders = [
            None
            if samples is None
            else Batches(
                samples,
                train.micro_batch_size,
                data_parallel_rank=grid.data_rank,
                data_parallel_size=grid.layout.data,
                rules=rules,
                num_workers=data.num_workers,
            )
            for samples in splits[:2]
        ]
        self._training, self._validation = loaders
        self.has_validation = self._validation is not None

    def training(self, consumed_samples: int, size: int) -> list[PassInputs]:
        assert self._training is not None
        return [gpt_inputs(m, self._masked, self._device) for m in self._training.get(consumed_samples, size)]

    def validation(self, start: int, size: int) -> list[PassInputs] | None:
        if self._validation is None:
            return None
        return [gpt_inputs(m, self._masked, self._device) for m in self._validation.get(start, size)]

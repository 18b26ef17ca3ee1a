"""What differs between model families: the module, the samples, the arguments of the stages, the terms of the loss."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.config import Config, ParallelConfig
from holdfast.data.loader import (
    BertBatches,
    BertMicroBatch,
    DocumentRules,
    GPTBatches,
    MicroBatch,
    PackedBatches,
    RankBatches,
)
from holdfast.data.samples.bert import SPECIAL_TOKENS, BertRules, BertVocabulary, build_bert_splits
from holdfast.data.samples.gpt import build_gpt_splits
from holdfast.data.samples.masking import Masking
from holdfast.data.samples.packed import padding_share
from holdfast.models.bert import BERT
from holdfast.models.gpt import GPT
from holdfast.models.initial import initial_value
from holdfast.models.segments import Segments, padded_ends
from holdfast.parallel.layout import padded_vocab_size, stage_layers
from holdfast.parallel.mesh import Grid
from holdfast.parallel.parallelize import initialize, parallelize
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.train.checks.preflight import tokenizer_of
from holdfast.train.kernel_choice import choose_kernels
from holdfast.train.schedule import batches_of
from holdfast.train.step import PassInputs

SplitSizes = tuple[int, int, int]
"""Samples that the run needs from the training, validation and test split."""


@dataclass(frozen=True)
class BatchSource:
    """Where a family's micro batches come from."""

    splits: Sequence[Any]
    """Training, validation and test samples; None where there are none."""
    batches: Callable[..., RankBatches[Any]]
    inputs: Callable[[Any, torch.device], PassInputs]


@dataclass(frozen=True)
class Family:
    """One kind of model."""

    model: type[GPT] | type[BERT]
    terms: tuple[str, ...]
    """What the last stage sums over the samples: losses, whose names end in "loss", and values that are only reported. The run's
    loss is the sum of the losses, each a mean over its own targets."""
    predicted: float
    """Fraction of the tokens that the output matrix is multiplied with."""
    source: Callable[[Config, SplitSizes], BatchSource]


def family_of(config: Config) -> Family:
    if config.model.model_type == "gpt":
        return Family(GPT, ("lm_loss", "z_loss") if config.optimizer.z_loss else ("loss",), 1.0, gpt_source)
    terms = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
    predicted = max_predictions(config) / config.data.seq_length
    return Family(BERT, terms[:2] if config.model.bert_no_binary_head else terms, predicted, bert_source)


def compute_dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.train.bf16 else torch.float16 if config.train.fp16 else torch.float32


def build_stage(
    config: Config, stage: int, tensor: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> GPT | BERT:
    """One pipeline stage on the meta device, without memory for its weights."""
    stages = stage_layers(config.model, config.parallel)
    with torch.device("meta"):
        module = family_of(config).model(
            config.model,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size(vocab_size, config.model, tensor),
            max_positions=config.model.max_position_embeddings or config.data.seq_length,
            dtype=dtype,
            layers=stages[stage],
            is_first=stage == 0,
            is_last=stage == len(stages) - 1,
        )
    if isinstance(module, GPT):
        module.z_loss = config.optimizer.z_loss
    return module


def parameter_names(config: Config) -> list[str]:
    """The names of the whole model's parameters."""
    assert config.model.vocab_size is not None
    whole = build_stage(replace(config, parallel=ParallelConfig()), 0, 1, config.model.vocab_size)
    return [name for name, _ in whole.named_parameters()]


def build_stages(config: Config, grid: Grid, vocab_size: int) -> list[nn.Module]:
    """The pipeline stages of this rank, parallelized: one, or several in the interleaved schedule. The weights have no values."""
    dtype = compute_dtype(config)
    compiled = config.train.compile if config.train.compile is not None else grid.device.type == "cuda"
    stages: list[nn.Module] = []
    for number in range(grid.index("pipeline"), grid.layout.pipeline * grid.layout.virtual, grid.layout.pipeline):
        stage = build_stage(config, number, grid.layout.tensor, vocab_size, dtype)
        parallelize(
            stage,
            grid,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.train.recompute_granularity,
            compiled=compiled,
            fp8=config.train.fp8,
            delayed=config.train.fp8_recipe == "delayed",
            dtype=dtype,
        )
        stages.append(stage)
    choose_kernels(config, stages, grid, dtype)
    fused = any(getattr(module, "fused", False) for stage in stages for module in stage.modules())
    for flag, wanted in (("attention", config.train.attention_backend), ("mlp", config.train.mlp_backend)):
        if wanted != "auto" and not fused and grid.rank == 0:
            log(f"warning: --{flag}-backend has no effect here: it chooses a kernel of layers that run on Triton")
    if config.train.fp8 and not any(getattr(module, "fp8", False) for stage in stages for module in stage.modules()):
        log(
            "warning: --fp8 has no effect here: it needs --bf16, a GPU with fp8, and a run without dropout, recomputation, "
            "tensor parallelism and FSDP2"
        )
    return stages


def initialize_stages(config: Config, stages: Sequence[nn.Module], vocab_size: int) -> None:
    """Gives the weights their initial values, decided by the seed and their names."""
    initial = functools.partial(initial_value, config=config.model, seed=config.train.seed, vocab_size=vocab_size)
    for stage in stages:
        initialize(stage, initial)


def stage_shapes(config: Config, grid: Grid) -> dict[str, Any]:
    """Shapes and type of the activations between stages, for the pipeline schedule."""
    return {
        "micro_batch_size": config.train.micro_batch_size,
        "seq_length": config.data.seq_length,
        "hidden_size": config.model.hidden_size,
        "sequence_shards": grid.layout.tensor if config.parallel.sequence_parallel else 1,
        "dtype": compute_dtype(config),
    }


def gpt_source(config: Config, sizes: SplitSizes) -> BatchSource:
    data = config.data
    packed = data.packing == "best-fit"
    splits = build_gpt_splits(
        data.data_path, data.split, data.seq_length, config.train.seed, sizes, data.data_cache_path, packed
    )
    tokenizer = tokenizer_of(config)
    rules = DocumentRules(
        tokenizer.eod if tokenizer else None,
        data.reset_position_ids and not packed,  # packed samples know their documents
        data.reset_attention_mask and not packed,
        data.eod_mask_loss,
    )
    ends = None if config.parallel.pipeline_model_parallel_size > 1 else DocumentEnds()
    inputs = functools.partial(gpt_inputs, packed or data.eod_mask_loss, ends)
    return BatchSource(splits, functools.partial(PackedBatches if packed else GPTBatches, rules=rules), inputs)


class DocumentEnds:
    """Where the documents of a micro batch end, with room for as many as any micro batch before had: then the shape rarely
    changes, which a CUDA graph needs."""

    def __init__(self) -> None:
        self._most = 0

    def of(self, documents_BT: Tensor) -> Tensor:
        ends = Segments.of(documents_BT).ends
        self._most = max(self._most, len(ends) - 1)
        return padded_ends(ends, documents_BT.numel(), self._most)


def gpt_inputs(masked: bool, ends: DocumentEnds | None, micro: MicroBatch, device: torch.device) -> PassInputs:
    """A GPT micro batch as arguments of the stages. Without `ends` documents stay numbers of tokens, which a pipeline schedule
    can split."""
    target_counts = micro.loss_mask.sum()[None] if masked else None
    stage_inputs = {}
    if ends is not None and micro.document_ids is not None:
        stage_inputs["document_ends"] = ends.of(micro.document_ids).to(device, non_blocking=True)
        micro = replace(micro, document_ids=None)
    here = micro.to(device)
    if here.position_ids is not None:
        stage_inputs["positions_BT"] = here.position_ids
    if here.document_ids is not None:
        stage_inputs["documents_BT"] = here.document_ids
    loss_inputs = {"labels_BT": here.labels, **({"loss_mask_BT": here.loss_mask} if masked else {})}
    return PassInputs(here.tokens, stage_inputs, loss_inputs, target_counts)


def bert_source(config: Config, sizes: SplitSizes) -> BatchSource:
    data = config.data
    tokenizer = tokenizer_of(config)
    assert tokenizer is not None  # checked before any rank started
    binary = not config.model.bert_no_binary_head
    rules = BertRules(
        Masking(data.masked_lm_prob, data.bert_whole_word_mask, data.bert_max_ngrams),
        data.short_seq_prob,
        binary,
        data.bert_sentence_order,
    )
    splits = build_bert_splits(
        data.data_path,
        data.split,
        data.seq_length,
        config.train.seed,
        sizes,
        BertVocabulary.of(tokenizer),
        rules,
        data.data_cache_path,
    )
    batches = functools.partial(BertBatches, most=max_predictions(config))
    return BatchSource(splits, batches, functools.partial(bert_inputs, binary))


def max_predictions(config: Config) -> int:
    """The largest number of tokens that any sample predicts."""
    return Masking(config.data.masked_lm_prob).most(config.data.seq_length - SPECIAL_TOKENS)


def bert_inputs(binary: bool, micro: BertMicroBatch, device: torch.device) -> PassInputs:
    """A BERT micro batch as arguments of the stages."""
    masked, pairs = micro.place_weights.sum(), torch.tensor(float(len(micro.tokens)))
    target_counts = torch.stack((masked, masked, pairs, pairs) if binary else (masked, masked))
    stage_inputs = {"padding_BT": micro.padding_mask, "types_BT": micro.tokentype_ids}
    loss_inputs = {
        "places_BP": micro.places,
        "labels_BP": micro.place_labels,
        "weights_BP": micro.place_weights,
        **({"is_random_B": micro.is_random} if binary else {}),
    }

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    tokens = micro.tokens.to(device, non_blocking=True)
    return PassInputs(tokens, moved(stage_inputs), moved(loss_inputs), target_counts)


def _check_enough(what: str, samples: Sequence[Any] | None, needed: int, otherwise: str) -> None:
    if samples is not None and len(samples) < needed:
        raise HoldfastError(
            f"the run needs {needed:,} {what} samples, but the data has {len(samples):,}: datasets blended without weights "
            f"are read once; give weights, or {otherwise}"
        )


class BatchFeed:
    """This rank's micro batches of any step: a pure function of the number of consumed samples."""

    def __init__(self, config: Config, grid: Grid) -> None:
        train, data = config.train, config.data
        batches = batches_of(config, grid.layout.data)
        iterations = batches.iterations(train.train_iters)
        evaluations = iterations // train.eval_interval if train.eval_interval else 0
        # The last step takes a whole batch, also where train_samples is not a multiple of it.
        sizes = (batches.samples(iterations), evaluations * train.eval_iters * batches.full, 0)
        source = family_of(config).source(config, sizes)
        self._inputs, self._device = source.inputs, grid.device
        if source.splits[0] is None:
            raise HoldfastError(f"split '{data.split}' leaves no documents for training")
        _check_enough("training", source.splits[0], sizes[0], "train for less")
        _check_enough("validation", source.splits[1], sizes[1], "evaluate less (--eval-interval, --eval-iters)")
        self.padding_share = padding_share(source.splits[0])
        """Share of padding in the training samples; None where samples have no padding of their own."""
        if self.padding_share is not None:
            log(f"packing best-fit: {self.padding_share:.2%} of the tokens of the training samples are padding")
        self._training, self._validation = (
            None
            if samples is None
            else source.batches(
                samples,
                train.micro_batch_size,
                data_parallel_rank=grid.data_rank,
                data_parallel_size=grid.layout.data,
                num_workers=data.num_workers,
            )
            for samples in source.splits[:2]
        )
        self.has_validation = self._validation is not None

    def training(self, consumed_samples: int, size: int) -> list[PassInputs]:
        assert self._training is not None
        return [self._inputs(micro, self._device) for micro in self._training.get(consumed_samples, size)]

    def validation(self, start: int, size: int) -> list[PassInputs]:
        assert self._validation is not None
        return [self._inputs(micro, self._device) for micro in self._validation.get(start, size)]

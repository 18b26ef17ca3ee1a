"""The contenders of `bench train`: each is a model and an optimizer whose `step` does a whole training step.

All use the same batches and shapes, fp32 weights with bf16 compute where the configuration has it, fused AdamW, and clipping to
a global norm of 1. Holdfast's step calls the functions that `holdfast train` runs.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from holdfast.bench.plain_gpt import PlainGPT, PlainShape
from holdfast.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, read_config
from holdfast.conversion.huggingface.config import describe_for_huggingface
from holdfast.conversion.model import Architecture
from holdfast.data.loader import BertMicroBatch, MicroBatch, predictions
from holdfast.models.layers import Shape
from holdfast.parallel.layout import padded_vocab_size
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding
from holdfast.parallel.zero import RowGather, updated_parameters
from holdfast.train.kernel_choice import GraphChoice
from holdfast.train.model_families import (
    bert_inputs,
    build_stages,
    compute_dtype,
    family_of,
    gpt_inputs,
    initialize_stages,
    max_predictions,
    stage_shapes,
)
from holdfast.train.optim import GradientNorm, HostCopy, build_optimizer, clip_and_step
from holdfast.train.step import ForwardBackward, PassInputs

Begin = Callable[[str], None]
"""Receives the name of a phase when the phase begins."""
Batch = MicroBatch | BertMicroBatch


def chosen_config(path: Path | None, cuda: bool, seq_length: int) -> Config:
    """The configuration at `path`; without one GPT-2 345M in bf16 on CUDA, a tiny GPT on the CPU."""
    if path is not None:
        return read_config(path)
    layers, width, heads, vocabulary = (24, 1024, 16, 50257) if cuda else (4, 256, 4, 4096)
    model = ModelConfig(num_layers=layers, hidden_size=width, num_attention_heads=heads, vocab_size=vocabulary)
    return Config(
        model=replace(model, openai_gelu=True),
        data=DataConfig(seq_length=seq_length),
        train=TrainConfig(micro_batch_size=32 if cuda else 4, bf16=cuda),
        optimizer=OptimizerConfig(weight_decay=0.1, adam_beta2=0.95),
    )


def random_batch(config: Config, device: torch.device, seed: int) -> Batch:
    """Random tokens; for BERT some of them are masked, the same number in every sample."""
    generator = torch.Generator().manual_seed(seed)
    size, length = config.train.micro_batch_size, config.data.seq_length
    tokens = torch.randint(0, config.model.vocab_size or 1, (size, length + 1), generator=generator)
    found: Batch
    if config.model.model_type == "gpt":
        words, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        found = MicroBatch(words, labels, torch.ones(size, length), None, None)
    else:
        places = torch.rand(size, length, generator=generator).argsort(1)[:, : max_predictions(config)]
        mask = torch.zeros(size, length).scatter(1, places, 1.0)
        words = tokens[:, :-1].contiguous()
        labels = torch.where(mask > 0, words, -1)
        types = (torch.arange(length) >= length // 2).long().expand(size, -1).contiguous()
        pairs = torch.randint(0, 2, (size,), generator=generator)
        predicted = predictions(labels.numpy(), mask.numpy(), max_predictions(config))
        chosen = {name: torch.from_numpy(array) for name, array in predicted.items()}
        padding = torch.ones(size, length, dtype=torch.bool)
        found = BertMicroBatch(words, types, labels, mask, padding, pairs, **chosen)
    if device.type == "cuda":
        pinned = {name: tensor.pin_memory() for name, tensor in vars(found).items() if tensor is not None}
        found = replace(found, **pinned)
    return found


class Contender(Protocol):
    def step(self, batch: Batch, begin: Begin) -> Tensor:
        """One whole training step; the loss, still on the device."""


class HoldfastContender:
    """The functions of `holdfast train`, in the order of its loop."""

    def __init__(self, config: Config, grid: Grid) -> None:
        model = config.model
        assert model.vocab_size is not None
        self._device, self._clip = grid.device, config.optimizer.clip_grad
        self._inputs: Callable[..., PassInputs] = functools.partial(gpt_inputs, False, None)
        if model.model_type == "bert":
            self._inputs = functools.partial(bert_inputs, not model.bert_no_binary_head)
        self.stages = stages = build_stages(config, grid, model.vocab_size)
        initialize_stages(config, stages, model.vocab_size)
        updated = updated_parameters(stages, grid)
        tied = TiedEmbedding(stages, grid, not model.untie_embeddings_and_output_weights, updated)
        terms = family_of(config).terms
        self._losses = [1 + index for index, name in enumerate(terms) if name.endswith("loss")]
        shapes, graph = stage_shapes(config, grid), config.train.cuda_graph
        self._passes = ForwardBackward(stages, grid, tied, updated, terms, shapes, graph, GraphChoice.of(config, grid))
        self._norm = GradientNorm(updated.values(), grid, tied.copy)
        self.optimizer = build_optimizer(stages, config.optimizer, compute_dtype(config), updated)
        self._gather_rows = RowGather(updated, grid)

    def step(self, batch: Batch, begin: Begin, before_update: Callable[[], None] = lambda: None) -> Tensor:
        """`before_update` is called when all gradients are there, where the loop commits the last snapshot."""
        begin("data")
        inputs = self._inputs(batch, self._device)
        self.optimizer.zero_grad(set_to_none=True)
        self._passes.on_phase = begin
        means = self._passes.gradients([inputs], 1.0)
        before_update()
        begin("communication")
        sums = self._norm.reduce(*means)
        arriving = HostCopy(sums)
        begin("optimizer")
        clip_and_step(self.optimizer, sums[0], self._clip, 1.0)
        self._gather_rows()
        begin("end")
        return arriving.wait()[self._losses].sum()


class AutocastContender:
    """A model that gives its own mean loss, trained as nanoGPT's and Hugging Face's examples train: under autocast."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self._device, self._clip = device, config.optimizer.clip_grad
        self._model = model.to(device).train()
        optim, parameters = config.optimizer, list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (optim.adam_beta1, optim.adam_beta2)
        self._optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)
        dtype = torch.bfloat16 if config.train.bf16 else torch.float16
        narrow = config.train.bf16 or config.train.fp16
        self._context = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=narrow)
        compiled = device.type == "cuda" if config.train.compile is None else config.train.compile
        self._forward: Callable[..., Any] = torch.compile(self._model) if compiled else self._model

    def step(self, batch: Batch, begin: Begin) -> Tensor:
        begin("data")
        here = batch.to(self._device)
        begin("forward")
        with self._context():
            loss: Tensor = self.loss(here)
        begin("backward")
        loss.backward()
        begin("optimizer")
        if self._clip > 0:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        begin("end")
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        found: Tensor = self._forward(batch.tokens, batch.labels)
        return found


class HuggingFaceContender(AutocastContender):
    """The same for a model of `transformers`, which shifts a GPT's labels itself."""

    def loss(self, batch: Batch) -> Tensor:
        if isinstance(batch, BertMicroBatch):
            found: Tensor = self._forward(
                input_ids=batch.tokens,
                token_type_ids=batch.tokentype_ids,
                labels=batch.labels.masked_fill(batch.labels < 0, -100),
                next_sentence_label=batch.is_random,
            ).loss
        else:
            found = self._forward(input_ids=batch.tokens, labels=batch.tokens).loss
        return found


def plain_gpt(config: Config, device: torch.device) -> Contender:
    model = config.model
    positions = model.max_position_embeddings or config.data.seq_length
    shape = PlainShape(model.num_layers, model.hidden_size, model.num_attention_heads, positions, _padded(config))
    with device:
        return AutocastContender(PlainGPT(shape), config, device)


def hugging_face(config: Config, device: torch.device) -> Contender:
    with device:
        return HuggingFaceContender(hugging_face_model(config), config, device)


def hugging_face_model(config: Config) -> Any:
    """The model of `transformers` that computes the configuration's function, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining

    shape, padded = Shape.of(config.model), _padded(config)
    sizes = {"num_query_groups": shape.groups, "kv_channels": shape.head, "ffn_hidden_size": shape.ffn}
    sizes |= {"vocab_size": padded, "padded_vocab_size": padded}
    sizes["max_position_embeddings"] = config.model.max_position_embeddings or config.data.seq_length
    gelu = "gelu_tanh" if config.model.openai_gelu else "gelu"
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "head_activation": gelu}
    arch = Architecture(**{**vars(config.model), **sizes, **off})
    # ids that generation would stop at or start with do not matter here, but must be in the vocabulary
    _, described, _ = describe_for_huggingface(arch, "F32", {"bos_token_id": 0, "eos_token_id": 0})
    kind = AutoModelForPreTraining if config.model.model_type == "bert" else AutoModelForCausalLM
    return kind.from_config(AutoConfig.for_model(**described | {"use_cache": False}))


PEERS: dict[str, Callable[[Config, torch.device], Contender]] = {"nanogpt": plain_gpt, "hf": hugging_face}


def is_gpt2(config: Config) -> bool:
    """Whether `PlainGPT` computes the configuration's function."""
    model = config.model
    learned = model.position_embedding_type == "learned_absolute" and model.normalization == "LayerNorm"
    grouped = Shape.of(model).heads_per_group > 1 or Shape.of(model).ffn != 4 * model.hidden_size
    return model.model_type == "gpt" and learned and not (model.gated or grouped)


def _padded(config: Config) -> int:
    assert config.model.vocab_size is not None
    return padded_vocab_size(config.model.vocab_size, config.model, 1)

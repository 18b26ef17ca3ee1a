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
from holdfast.data.loader import BertMicroBatch, MicroBatch
from holdfast.models.layers import Shape
from holdfast.parallel.layout import padded_vocab_size
from holdfast.parallel.mesh import Grid
from holdfast.parallel.pipeline import TiedEmbedding
from holdfast.system.errors import UsageError
from holdfast.train.model_families import (
    bert_inputs,
    build_stages,
    compute_dtype,
    family_of,
    gpt_inputs,
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
        found = BertMicroBatch(words, types, labels, mask, torch.ones(size, length, dtype=torch.bool), pairs)
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
        self._inputs: Callable[..., PassInputs] = functools.partial(gpt_inputs, False)
        if model.model_type == "bert":
            self._inputs = functools.partial(bert_inputs, max_predictions(config), not model.bert_no_binary_head)
        stages = build_stages(config, grid, model.vocab_size)
        tied = TiedEmbedding(stages, grid, not model.untie_embeddings_and_output_weights)
        terms = family_of(config).terms
        self._losses = [1 + index for index, name in enumerate(terms) if name.endswith("loss")]
        self._passes = ForwardBackward(stages, grid, tied, terms, stage_shapes(config, grid))
        self._norm = GradientNorm(stages, grid, tied.copy)
        self._optimizer = build_optimizer(stages, config.optimizer, compute_dtype(config))

    def step(self, batch: Batch, begin: Begin) -> Tensor:
        begin("data")
        inputs = self._inputs(batch, self._device)
        self._optimizer.zero_grad(set_to_none=True)
        self._passes.on_phase = begin
        means = self._passes.gradients([inputs], 1.0)
        begin("communication")
        sums = self._norm.reduce(*means)
        arriving = HostCopy(sums)
        begin("optimizer")
        clip_and_step(self._optimizer, sums[0], self._clip, 1.0)
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
    if not _is_gpt2(config):
        raise UsageError("the nanogpt baseline is GPT-2's shape; for others measure --against hf")
    positions = model.max_position_embeddings or config.data.seq_length
    shape = PlainShape(model.num_layers, model.hidden_size, model.num_attention_heads, positions, _padded(config))
    with device:
        return AutocastContender(PlainGPT(shape), config, device)


def hugging_face(config: Config, device: torch.device) -> Contender:
    with device:
        return HuggingFaceContender(hugging_face_model(config), config, device)


def hugging_face_model(config: Config) -> Any:
    """The model of `transformers` with the configuration's shape, without dropout."""
    model, shape = config.model, Shape.of(config.model)
    positions = model.max_position_embeddings or config.data.seq_length
    # ids that generation would stop at or start with do not matter here, but must be in the vocabulary
    special = {"bos_token_id": 0, "eos_token_id": 0}
    if model.model_type == "bert":
        from transformers import BertConfig, BertForPreTraining

        return BertForPreTraining(
            BertConfig(
                vocab_size=_padded(config), hidden_size=model.hidden_size, num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads, intermediate_size=shape.ffn, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, max_position_embeddings=positions, layer_norm_eps=model.norm_epsilon,
            )
        )  # fmt: skip
    if _is_gpt2(config):
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=_padded(config), n_positions=positions, n_embd=model.hidden_size, n_layer=model.num_layers,
                n_head=model.num_attention_heads, n_inner=shape.ffn, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                activation_function="gelu_new" if model.openai_gelu else "gelu", use_cache=False, **special,
            )
        )  # fmt: skip
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_padded(config), hidden_size=model.hidden_size, intermediate_size=shape.ffn,
            num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
            num_key_value_heads=shape.groups, max_position_embeddings=positions, head_dim=shape.head,
            tie_word_embeddings=not model.untie_embeddings_and_output_weights, use_cache=False, **special,
        )
    )  # fmt: skip


PEERS: dict[str, Callable[[Config, torch.device], Contender]] = {"nanogpt": plain_gpt, "hf": hugging_face}


def _is_gpt2(config: Config) -> bool:
    model = config.model
    learned = model.position_embedding_type == "learned_absolute" and model.normalization == "LayerNorm"
    return model.model_type == "gpt" and learned


def _padded(config: Config) -> int:
    assert config.model.vocab_size is not None
    return padded_vocab_size(config.model.vocab_size, config.model, 1)

"""One pass of the model over the slots: prompts that join, and a token (or a few) for every slot.

`DecodeStep` is the interface of a step; `PlainStep` computes it with the model's own layers and is the reference for every faster
one. `choose_step` picks the step for a model.

Shapes: B slots, T tokens, S entries attended to, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, Protocol

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.generation.cache import SlotCache
from holdfast.generation.cpu_step import CPUStep, can_step_directly
from holdfast.models.gpt import GPT
from holdfast.models.layers import KeyValueCache
from holdfast.models.segments import visible
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

WeightType = Literal["int8", "fp8"]
# `agrees` compares the logits after so many tokens; bf16 layers differ from fp32 by about 1%.
CHECKED_TOKENS, CHECKED_ERROR = 4, 0.05


def is_compiled(model: GPT) -> bool:
    return any(layer._compiled_call_impl is not None for layer in model.decoder.layers.values())


class DecodeStep(Protocol):
    def __call__(self, tokens_B: Tensor, positions_B: Tensor, cache: SlotCache, span: int) -> Tensor:
        """Feeds the slots 0 to B - 1 one token each and returns the logits (B, V) of the token after it.

        Writes the keys and values of `tokens_B` at `positions_B`; a slot attends to its entries up to its own position. All
        positions are below `span`, a bound that the host knows. Must not wait for the device: on CUDA the call is recorded as
        a graph, which has the same tensors at every replay.
        """


class PlainStep:
    """The model's own layers."""

    def __init__(self, model: GPT) -> None:
        self._model = model

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, cache: SlotCache, span: int) -> Tensor:
        return feed(self._model, tokens_B[:, None], positions_B, cache, span)[:, 0]


def choose_step(model: GPT, weights: WeightType | None = None) -> DecodeStep:
    """The fastest step for this model on its device. `weights`: read 8-bit copies of the matrices, which only CUDA has."""
    if kernels.available() and model.output_matrix().is_cuda:
        from holdfast.generation.fused_step import FusedStep, can_fuse_step

        if can_fuse_step(model):
            fused = FusedStep(model, PlainStep(model), weights=weights)
            if weights is not None or agrees(fused, PlainStep(model), model):
                return fused
            log(
                "warning: the fused decoding kernels compute other logits than the model on this device; generating without them"
            )
            return PlainStep(model)
    if weights is not None:
        raise HoldfastError(
            f"{weights} weights need a CUDA device and a GPT-2 or Llama type of model in bf16 with a head width of 64 to 128; "
            "leave out --weights"
        )
    if can_step_directly(model) and not is_compiled(model):
        return CPUStep(model)
    return PlainStep(model)


@torch.no_grad()
def agrees(step: DecodeStep, reference: DecodeStep, model: GPT) -> bool:
    """Whether two steps give the same logits within the rounding of 16-bit types, for one slot and for two."""
    device = model.output_matrix().device
    for rows in (1, 2):
        caches = [SlotCache(model.config, rows, CHECKED_TOKENS, model.dtype, device) for _ in range(2)]
        for place in range(CHECKED_TOKENS):
            tokens = (torch.arange(rows, device=device) * 7 + place * 3 + 1) % model.vocab_size
            positions = torch.full((rows,), place, device=device)
            found, expected = (
                each(tokens, positions, cache, CHECKED_TOKENS).float()
                for each, cache in zip((step, reference), caches, strict=True)
            )
        if not (found - expected).norm() < CHECKED_ERROR * expected.norm():  # also where something is not a number
            return False
    return True


def feed(model: GPT, tokens_BT: Tensor, positions_B: Tensor, cache: SlotCache, span: int) -> Tensor:
    """Logits (B, T, V) after each of T tokens that the slots 0 to B - 1 continue with from `positions_B`."""
    positions = positions_B[:, None] + torch.arange(tokens_BT.shape[1], device=positions_B.device)
    entries, masks = torch.arange(span, device=positions_B.device), {}
    for window in model.windows():
        seen = visible(positions, entries, window)[:, None]
        masks[window] = torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, -torch.inf)
    hidden = model.hidden(tokens_BT, positions, caches=cache.writing(positions, span), masks=masks)
    return model.logits(hidden)


def read_prompts(
    model: GPT, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]], cache: SlotCache
) -> Tensor:
    """Reads each prompt into its slots and returns the logits (prompts, V) of the token after it.

    Prompts are padded at their ends to the longest; causal attention never reads the padding.
    """
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return read_padded(model, padded, ends, cache.reading(slots))


def padded_positions(model: GPT, tokens_BT: Tensor, ends_B: Tensor) -> Tensor | None:
    """Positions of rows that are padded after `ends_B`; None where the padding has no effect.

    Dynamic rotary scaling depends on the length of a text, which its padding must not change."""
    if not (model.config.use_rope_scaling and model.config.rope_scaling_type == "dynamic"):
        return None
    return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).minimum(ends_B[:, None])


def read_padded(model: GPT, tokens_BT: Tensor, ends_B: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
    """Logits (B, V) after the tokens up to `ends_B` of each row."""
    device, positions = tokens_BT.device, padded_positions(model, tokens_BT, ends_B)
    # Compiled layers run eagerly here, since the shape does not recur. The call imports the compiler, which takes a second.
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        hidden = model.hidden(tokens_BT, positions, caches=caches)
    return model.logits(hidden[torch.arange(len(tokens_BT), device=device), ends_B])

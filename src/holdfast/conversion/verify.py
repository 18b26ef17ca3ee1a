"""`--verify`: what was written is read again and compared with the source, as bits and as a function.

The invariant: a conversion that fails here has not appeared under its final name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.conversion.budget import Budget
from holdfast.conversion.forward import Array, huggingface_forward, megatron_forward
from holdfast.conversion.huggingface_read import read_json, read_weights
from holdfast.conversion.model import VOCABULARY_TENSORS, Model
from holdfast.conversion.safetensors_files import read_safetensors
from holdfast.conversion.sources import read_model
from holdfast.errors import HoldfastError

TOKENS = 16
LARGEST_DIFFERENCE = 1e-9
"""On logits relative to their largest; rounding in fp64 gives about 1e-14, the truncated constants of a fused GELU 1e-10."""

RELEASE_IDS = (101, 7110, 1005, 1056, 2023, 11333, 17413, 1029, 102)
# Published for NVIDIA's GPT-2 345M in fp16: logits[8 i // 17, 2792 i] for i = 0 .. 18.
GPT2_RELEASE = (
    4.9414, -0.2920, -1.2148, -4.0273, -0.5161, -5.2109, -1.2412, -1.8301, -1.7734, -4.7148, -0.2317, -1.0811, -2.1777, 0.4141,
    -3.7969, -4.0586, -2.5332, -3.3809, 4.3867,
)  # fmt: skip
# Published for NVIDIA's uncased BERT 345M: the first 3 × 3 of the hidden states (computed with epsilon 1e-12).
BERT_RELEASE = ((-0.6040, -0.2517, -0.1025), (0.3420, -0.6758, -0.0017), (-0.1089, -0.1990, 0.5728))


def verify_conversion(model: Model, folder: Path, to: str, digests: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Compares the written folder with the model it was written from; gives the largest difference of the logits."""
    written = _verify_files(folder, digests)
    target = read_model(folder)
    compared = _verify_tensors(model, target)
    arch = model.architecture
    ids = np.random.default_rng(0).integers(0, arch.vocabulary(), min(TOKENS, arch.max_position_embeddings))
    source_side = megatron_forward(arch, model.tensors, ids)
    if to == "hf":
        config, (tensors, _) = read_json(folder / "config.json"), read_weights(folder, Budget())
        target_side = huggingface_forward(config, tensors, ids)
    else:
        target_side = megatron_forward(target.architecture, target.tensors, ids)
    difference = _difference(source_side, target_side)
    summary = f"{written + compared} checksums equal, largest difference of fp64 logits {difference:.1e}"
    found: dict[str, Any] = {"checksums": written + compared, "largest_difference": difference}
    # The one difference that is allowed, because it was said: the GELU in BERT's head.
    same_head = arch.family == "gpt" or arch.head_activation == target.architecture.head_activation
    exact = same_head and all(tensor.dtype == _kind(target, name) for name, tensor in model.tensors.items())
    if exact and difference > LARGEST_DIFFERENCE:
        raise HoldfastError(
            f"verification failed: the target's logits differ by {difference:.1e}; nothing was published"
        )
    published = _published(model)
    if published is not None:
        found["published_difference"] = published
        summary += f"; {published:.1e} from the published values of the release (fp16 rounding gives up to 2e-2)"
    return {**found, "exact": exact, "summary": summary}


def _kind(target: Model, name: str) -> str:
    return target.tensors[name].stored


def _verify_files(folder: Path, digests: Mapping[str, Mapping[str, str]]) -> int:
    """What lies on the disk against what went there."""
    count = 0
    for name, wanted in digests.items():
        if not name.endswith(".safetensors"):
            continue
        tensors, _, _ = read_safetensors(folder / name)
        for tensor, digest in wanted.items():
            if tensors[tensor].sha256() != digest:
                raise HoldfastError(f"verification failed: {name} holds other bits of {tensor} than were written")
            count += 1
    return count


def _verify_tensors(model: Model, target: Model) -> int:
    """The target, read as a model again, against the source."""
    size = model.architecture.vocabulary()
    for name, tensor in model.tensors.items():
        other = target.tensors.get(name)
        if other is None:
            raise HoldfastError(f"verification failed: {name} is not in the target")
        if name in VOCABULARY_TENSORS:
            tensor, other = tensor.rows(0, size), other.rows(0, size)
        if replace(tensor, dtype=other.stored).sha256() != other.sha256():
            raise HoldfastError(f"verification failed: {name} differs between source and target")
    return len(model.tensors)


def _difference(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    largest = 0.0
    for name in left.keys() & right.keys():
        scale = max(1.0, float(np.abs(left[name]).max()))
        largest = max(largest, float(np.abs(left[name] - right[name]).max()) / scale)
    return largest


def _published(model: Model) -> float | None:
    """The distance from the values published for NVIDIA's releases, for files that look like one."""
    arch = model.architecture
    if model.facts.get("args", True) or (arch.num_layers, arch.hidden_size) != (24, 1024):
        return None
    wanted = {("gpt", 50257): GPT2_RELEASE, ("bert", 30522): BERT_RELEASE}.get((arch.family, arch.vocabulary()))
    if wanted is None:
        return None
    values = megatron_forward(arch, model.tensors, np.array(RELEASE_IDS))
    if arch.family == "gpt":
        found = np.array([values["logits"][8 * i // 17, 2792 * i] for i in range(19)])
    else:
        found = values["hidden"][:3, :3]
    return float(np.abs(found - np.array(wanted)).max())

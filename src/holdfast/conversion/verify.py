"""`--verify`: what was written is read again and compared with the source, as bits and as a function.

The invariant: a conversion that fails here never gets its final name. Logits are compared like with like: where the
user asked for another element type, the source's weights are rounded first, and where BERT's head has another GELU (with a
note), the source's head uses that one. Then only the rounding of fp64 is left, and one tolerance holds for every case.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.conversion.files.raw_tensors import Array
from holdfast.conversion.files.safetensors_files import read_safetensors
from holdfast.conversion.forward_functions import open_forward
from holdfast.conversion.huggingface.read import read_json
from holdfast.conversion.huggingface.tokenizer_files import TokenizerFiles
from holdfast.conversion.model import VOCABULARY_TENSORS, MappedPages, Model, function_of
from holdfast.conversion.sources import read_model
from holdfast.conversion.stream import DROP_PAGES_EVERY, WritePlan, drop_pages
from holdfast.conversion.tensors import Tensor
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.folder import recipe_of

TOKENS = 16
SAMPLES = ("Hello, World! It's 3.14 o'clock.\n", "def f(x):\n    return x ** 2", "naïve façade 東京 🙂")
LARGEST_DIFFERENCE = 1e-9
"""On logits relative to their largest. Rounding in fp64 gives about 1e-16 per layer, 1e-13 for the deepest models; the smallest
mistakes that matter are far above: the wrong GELU gives 1e-5, a wrong epsilon 1e-3, a wrong order 1."""

RELEASE_IDS = (101, 7110, 1005, 1056, 2023, 11333, 17413, 1029, 102)
# Published for NVIDIA's GPT-2 345M in fp16: logits[8 i // 17, 2792 i] for i = 0 .. 18.
GPT2_RELEASE = (
    4.9414, -0.2920, -1.2148, -4.0273, -0.5161, -5.2109, -1.2412, -1.8301, -1.7734, -4.7148, -0.2317, -1.0811, -2.1777, 0.4141,
    -3.7969, -4.0586, -2.5332, -3.3809, 4.3867,
)  # fmt: skip
# Published for NVIDIA's uncased BERT 345M: the first 3 × 3 of the hidden states (computed with epsilon 1e-12).
BERT_RELEASE = ((-0.6040, -0.2517, -0.1025), (0.3420, -0.6758, -0.0017), (-0.1089, -0.1990, 0.5728))


def verify_conversion(
    source: Path,
    model: Model,
    folder: Path,
    plan: WritePlan,
    digests: Mapping[str, Mapping[str, str]],
    tokenizer: TokenizerFiles | None = None,
    heads: int | None = None,
    version: float | None = None,
) -> dict[str, Any]:
    """Compares the written folder with the source; gives the largest difference of the logits.

    `heads` and `version` are the user's flags for a Megatron source.
    """
    _verify_contents(folder, plan)
    _verify_tokenizer(folder, tokenizer)
    written = _verify_files(folder, digests)
    target = read_model(folder)
    compared = _verify_tensors(model, target)
    found: dict[str, Any] = {"checksums": written + compared}
    arch = model.architecture
    ids = np.random.default_rng(0).integers(0, arch.vocabulary(), min(TOKENS, arch.max_position_embeddings))
    rounded = _rounded(model, target)
    expected, given = open_forward(source, rounded, heads, version), open_forward(folder)
    # One GELU for trunk and head where the source has two, or Megatron-core's exact head: a note names both.
    two_forms = any(one.activation != one.head_activation for one in (expected, given))
    head = given.head_activation if arch.model_type == "bert" and two_forms else None
    target_side = given.run(ids, arch.vocabulary(), None)
    difference = _difference(expected.run(ids, arch.vocabulary(), head), target_side)
    if not difference <= LARGEST_DIFFERENCE:
        raise HoldfastError(
            f"verification failed: the target's logits differ by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}; "
            "nothing was published"
        )
    exact = rounded is None and head in (None, expected.head_activation)
    found |= {"largest_difference": difference, "tolerance": LARGEST_DIFFERENCE, "exact": exact}
    summary = f"{written + compared} checksums equal, largest difference of fp64 logits {difference:.1e}"
    if not exact:
        changed = _difference(open_forward(source, None, heads, version).run(ids, arch.vocabulary(), None), target_side)
        found["announced_difference"] = changed
        summary += f" after the announced changes (element type, GELU of BERT's head), which account for {changed:.1e}"
    published = _published(model, source, heads, version)
    if published is not None:
        found["published_difference"] = published
        summary += f"; {published:.1e} from the published values of the release (fp16 rounding gives up to 2e-2)"
    return {**found, "summary": summary}


def _rounded(model: Model, target: Model) -> str | None:
    """The element type of the target, if it is another than the source's."""
    kinds = {other.stored for name, other in target.tensors.items() if other.stored != model.tensors[name].stored}
    if len(kinds) > 1:
        raise HoldfastError(f"verification failed: the target mixes the element types {', '.join(sorted(kinds))}")
    return kinds.pop() if kinds else None


def _verify_contents(folder: Path, plan: WritePlan) -> None:
    """Configuration, tokenizer and generation files: as planned, and with ids that the vocabulary has."""
    for file in plan.files:
        if file.content is not None and (folder / file.name).read_bytes() != file.content:
            raise HoldfastError(f"verification failed: {file.name} differs from what was written")
    if not (folder / "config.json").is_file():
        return
    size = read_json(folder / "config.json").get("vocab_size")
    for name in ("config.json", "generation_config.json"):
        stated = read_json(folder / name) if (folder / name).is_file() else {}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            for number in np.ravel(stated[key]) if stated.get(key) is not None else ():
                if not 0 <= number < size:
                    raise HoldfastError(f"verification failed: {name} has {key} {number}, outside the vocabulary")


def _verify_tokenizer(folder: Path, tokenizer: TokenizerFiles | None) -> None:
    """The written tokenizer.json gives the ids that the source's tokenizer gives."""
    if tokenizer is None or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    recipe = recipe_of(tokenizer.names)
    expected = Tokenizer.from_str(recipe.definition)
    given = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in SAMPLES:
        ids = [each.encode(text, add_special_tokens=False).ids for each in (expected, given)]
        if ids[0] != ids[1]:
            raise HoldfastError(f"verification failed: the written tokenizer.json gives other ids for {text!r}")


def _verify_files(folder: Path, digests: Mapping[str, Mapping[str, str]]) -> int:
    """Compares the files on disk with the checksums of what was written."""
    count = 0
    for name, expected in digests.items():
        if not name.endswith(".safetensors"):
            continue
        tensors, _, region = read_safetensors(folder / name)
        for tensor, digest in expected.items():
            if _sha256(tensors[tensor], [region]) != digest:
                raise HoldfastError(f"verification failed: {name} holds other bits of {tensor} than were written")
            count += 1
    return count


def _verify_tensors(model: Model, target: Model) -> int:
    """Compares the target, read as a model, with the source."""
    size = model.architecture.vocabulary()
    theirs = function_of(target.architecture)
    for key, value in function_of(model.architecture).items():  # a window is longer than the ids that are compared
        if theirs.get(key) != value and key != "vocab_size":
            raise HoldfastError(f"verification failed: {key} is {value} in the source, {theirs.get(key)} in the target")
    for name, tensor in model.tensors.items():
        other = target.tensors.get(name)
        if other is None:
            raise HoldfastError(f"verification failed: {name} is not in the target")
        if name in VOCABULARY_TENSORS:
            tensor, other = tensor.rows(0, size), other.rows(0, size)
        if _sha256(replace(tensor, dtype=other.stored), model.regions) != _sha256(other, target.regions):
            raise HoldfastError(f"verification failed: {name} differs between source and target")
    return len(model.tensors)


def _sha256(tensor: Tensor, regions: Sequence[MappedPages]) -> str:
    digest, read = hashlib.sha256(), 0
    for block in tensor.blocks():
        digest.update(np.ascontiguousarray(block).data)
        read += block.nbytes
        if read >= DROP_PAGES_EVERY:
            drop_pages(regions)
            read = 0
    drop_pages(regions)
    return digest.hexdigest()


def _difference(left: Mapping[str, Array], right: Mapping[str, Array]) -> float:
    largest = 0.0
    for name in left.keys() & right.keys():
        scale = max(1.0, float(np.abs(left[name]).max()))
        difference = float(np.abs(left[name] - right[name]).max()) / scale
        largest = difference if not difference <= largest else largest  # nan counts as largest
    return largest


def _published(model: Model, source: Path, heads: int | None, version: float | None) -> float | None:
    """The distance from the values published for NVIDIA's releases, for files with the shapes of one."""
    arch = model.architecture
    if model.facts.get("args", True) or (arch.num_layers, arch.hidden_size) != (24, 1024):
        return None
    expected = {("gpt", 50257): GPT2_RELEASE, ("bert", 30522): BERT_RELEASE}.get((arch.model_type, arch.vocabulary()))
    if expected is None:
        return None
    values = open_forward(source, None, heads, version).run(np.array(RELEASE_IDS), arch.vocabulary(), None)
    if arch.model_type == "gpt":
        found = np.array([values["logits"][8 * i // 17, 2792 * i] for i in range(19)])
    else:
        found = values["hidden"][:3, :3]
    return float(np.abs(found - np.array(expected)).max())

"""Plans a Hugging Face folder: configuration, weights in shards, tokenizer files; everything that from_pretrained reads."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from holdfast.conversion.huggingface.config import describe_for_huggingface
from holdfast.conversion.huggingface.names import to_huggingface
from holdfast.conversion.huggingface.read import PADDING_FILE
from holdfast.conversion.huggingface.tokenizer_files import MAX_BYTES, TokenizerFiles, to_json
from holdfast.conversion.model import SPECIAL_IDS, VOCABULARY_TENSORS, Model, expected_shapes, valid_ids
from holdfast.conversion.stream import PlannedFile, WritePlan
from holdfast.conversion.tensors import Tensor
from holdfast.system.bounded_files import read_bounded
from holdfast.system.errors import UsageError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def plan_huggingface(
    model: Model,
    tokenizer: TokenizerFiles | None,
    dtype: str | None,
    max_shard_size: str,
    as_bin: bool,
    keep_padding: bool,
) -> WritePlan:
    """Every file of the folder, before the first is written."""
    arch, size = model.architecture, model.architecture.vocabulary()
    trimmed, padding = {}, {}
    for name in expected_shapes(arch):  # one order, whatever the source
        tensor = model.tensors[name]
        if name in VOCABULARY_TENSORS:
            if tensor.shape[0] > size:
                padding[name] = tensor.rows(size, tensor.shape[0])
            tensor = tensor.rows(0, size)
        trimmed[name] = tensor if dtype is None else tensor.cast(dtype)
    written = next(iter(trimmed.values())).dtype
    special_ids = special_ids_of(model, tokenizer)
    model_type, config, notes = describe_for_huggingface(arch, written, special_ids, model.facts.get("model_type"))
    if model.special_ids:
        config |= valid_ids(model.facts.get("config", {}), ["pad_token_id"], size)
    weights = to_huggingface(model_type, arch, trimmed)
    files = [PlannedFile("config.json", content=to_json(config))]
    if arch.model_type == "gpt":
        files.append(PlannedFile("generation_config.json", content=to_json(_generation(model, special_ids))))
    carried = {name: read_bounded(path, MAX_BYTES, "file of a tokenizer") for name, path in model.copied_files.items()}
    for name, content in {**(tokenizer.files if tokenizer else {}), **carried}.items():
        files.append(PlannedFile(name, content=content))
    files += _weight_files(weights, shard_bytes(max_shard_size), as_bin)
    if keep_padding and padding:
        files.append(
            PlannedFile(
                PADDING_FILE, padding, metadata={"make_vocab_size_divisible_by": str(arch.make_vocab_size_divisible_by)}
            )
        )
    if tokenizer is None and not carried:
        notes.append("no tokenizer files written: give --vocab-file and --merge-file to write them")
    if padding and not keep_padding:
        rows = arch.padded_vocab_size - size
        notes.append(f"{rows} rows of vocabulary padding left out (--keep-padding writes them to a separate file)")
    if model.facts.get("optimizer"):
        notes.append("optimizer state not converted: a Hugging Face folder does not hold it")
    return WritePlan(files, notes)


def _generation(model: Model, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: that of a Hugging Face source, completed from the configuration."""
    if model.generation:
        return {**special_ids, **model.generation}
    end = special_ids.get("eos_token_id")
    padding = {} if end is None else {"pad_token_id": end[0] if isinstance(end, list) else end}
    return {"_from_model_config": True, **padding, **special_ids}


def special_ids_of(model: Model, tokenizer: TokenizerFiles | None) -> dict[str, int | list[int]]:
    """bos_token_id and eos_token_id: as the source has them, else those of the tokenizer, else GPT-2's for its vocabulary."""
    if tokenizer is not None:
        known = {"bos_token_id": tokenizer.begin_of_text, "eos_token_id": tokenizer.end_of_text}
    else:
        known = dict.fromkeys(SPECIAL_IDS, 50256 if model.architecture.vocabulary() == 50257 else None)
    return {**{name: number for name, number in known.items() if number is not None}, **model.special_ids}


def shard_bytes(text: str) -> int:
    """'5GB' and the like."""
    number = text.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip().upper() or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise UsageError(f"--max-shard-size {text}: give a size such as 500MB or 5GB") from None
    if size <= 0:
        raise UsageError(f"--max-shard-size {text}: give a size such as 500MB or 5GB")
    return size


def _weight_files(weights: Mapping[str, Tensor], limit: int, as_bin: bool) -> list[PlannedFile]:
    stem, suffix = ("pytorch_model", "bin") if as_bin else ("model", "safetensors")
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        if shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        return [_weight_file(f"{stem}.{suffix}", shards[0], as_bin)]
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    files = [_weight_file(name, shard, as_bin) for name, shard in zip(names, shards, strict=True)]
    return [*files, PlannedFile(f"{stem}.{suffix}.index.json", content=to_json(index))]


def _weight_file(name: str, shard: dict[str, Tensor], as_bin: bool) -> PlannedFile:
    return PlannedFile(name, shard, tree=OrderedDict(shard) if as_bin else None)

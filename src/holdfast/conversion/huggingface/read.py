"""Reads Hugging Face folders: safetensors or pytorch_model.bin, sharded or not, without torch and without transformers."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.conversion.files.budget import MAX_FILES, Budget
from holdfast.conversion.files.safetensors_files import read_safetensors
from holdfast.conversion.files.torch_reader import load_torch
from holdfast.conversion.files.zips import Region, map_file
from holdfast.conversion.huggingface.config import architecture_from_config
from holdfast.conversion.huggingface.names import BUFFERS, from_huggingface
from holdfast.conversion.huggingface.tokenizer_files import MAX_BYTES, MAX_VALUES
from holdfast.conversion.megatron.rank_files import flatten
from holdfast.conversion.model import OUTPUT_LAYER, SPECIAL_IDS, Model, check_complete, valid_ids
from holdfast.conversion.tensors import Tensor
from holdfast.system.bounded_files import read_json as read_bounded_json
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.recipe import BERT_SPECIAL, END_OF_TEXT

MAX_JSON_BYTES = 16 << 20
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model",
)  # fmt: skip
# Settings of GPT-2's and BERT's tokenizers under which their vocabulary files alone give the ids.
USUAL_SETTINGS = {
    "add_prefix_space": False, "add_bos_token": False, "add_eos_token": False, "strip_accents": None,
    "tokenize_chinese_chars": True,
}  # fmt: skip
PADDING_FILE = "megatron_padding.safetensors"
WEIGHT_FILES = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)
_SHARD = re.compile(r"^[A-Za-z0-9._-]+\.(safetensors|bin)$")


def is_huggingface(path: Path) -> bool:
    return (path / "config.json").is_file() and any((path / name).is_file() for name in WEIGHT_FILES)


def read_huggingface(path: Path) -> Model:
    config = read_json(path / "config.json")
    origin = str(path)
    model_type, arch = architecture_from_config(config, origin)
    budget = Budget()
    stored, regions = read_weights(path, budget)
    for name, tensor in stored.items():
        if not tensor.shape:
            raise HoldfastError(f"{origin}: {name} is a single number, where weights are expected")
    tensors = from_huggingface(model_type, arch, stored, origin)
    notes: list[str] = []
    if arch.model_type == "bert":
        arch = replace(arch, bert_no_binary_head="binary_head.weight" not in tensors)
        dropped = [name for name in tensors if name.startswith("pooler.") and arch.bert_no_binary_head]
        tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
        notes += ["pooler without a sentence head: left out"] if dropped else []
    if not arch.tied and OUTPUT_LAYER not in tensors:
        raise HoldfastError(f"{origin}: tie_word_embeddings is false, but there is no output matrix (lm_head.weight)")
    check_complete(arch, tensors, origin)
    padding: dict[str, Tensor] = {}
    if (path / PADDING_FILE).is_file():
        padding, metadata, region = read_safetensors(path / PADDING_FILE)
        regions.append(region)
        multiple = str(metadata.get("make_vocab_size_divisible_by"))
        if re.fullmatch(r"[0-9]{1,20}", multiple):
            arch = replace(arch, make_vocab_size_divisible_by=int(multiple))
    return Model(
        architecture=arch,
        tensors=tensors,
        origin=f"Hugging Face folder, {config.get('model_type')}",
        notes=notes,
        facts={"kind": "huggingface", "model_type": model_type, "files": len(regions), "config": config},
        regions=list(regions),
        unchecked=budget.unchecked,
        tokenizer=tokenizer_in(path, arch.model_type, arch.padded_vocab_size),
        special_ids=valid_ids(config, SPECIAL_IDS, arch.padded_vocab_size),
        generation=_generation(path, arch.padded_vocab_size),
        copied_files={name: path / name for name in TOKENIZER_FILES if (path / name).is_file()},
        padding=padding,
    )


def _generation(path: Path, size: int) -> dict[str, Any]:
    """Generation settings of the folder; ids that the vocabulary does not have are left out."""
    stated = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    ids = {name for name in stated if name.endswith("_token_id")}
    return {name: value for name, value in stated.items() if name not in ids} | valid_ids(stated, ids, size)


def tokenizer_in(path: Path, family: str, rows: int) -> dict[str, str]:
    """The tokenizer of a folder, by Megatron's type name and its files. `rows`: those of the model's embedding."""
    there = {
        name: str(path / name)
        for name in ("vocab.txt", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model")
        if (path / name).is_file()
    }
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    if family == "bert" and "vocab.txt" in there and _is_plain(path, settings, BERT_SPECIAL, rows):
        cased = settings.get("do_lower_case") is False
        return {
            "tokenizer_type": "BertWordPieceCase" if cased else "BertWordPieceLowerCase",
            "vocab_file": there["vocab.txt"],
        }
    byte_level = settings.get("tokenizer_class") in (None, "GPT2Tokenizer", "GPT2TokenizerFast")
    if byte_level and {"vocab.json", "merges.txt"} <= there.keys() and _is_plain(path, settings, (END_OF_TEXT,), rows):
        files = {"vocab_file": there["vocab.json"], "merge_file": there["merges.txt"]}
        return {"tokenizer_type": "GPT2BPETokenizer", **files}
    for name, kind in (("tokenizer.json", "HuggingFaceTokenizer"), ("tokenizer.model", "Llama2Tokenizer")):
        if name in there:
            return {"tokenizer_type": kind, "tokenizer_model": there[name]}
    return {}


def _is_plain(path: Path, settings: Mapping[str, Any], known: Collection[str], rows: int) -> bool:
    """Whether the vocabulary's files alone decide the ids: no settings of another form, and no tokens beside the known ones.

    Added tokens without a row in the embedding do not count: the model was not made larger for them."""
    if any(settings.get(key, usual) != usual for key, usual in USUAL_SETTINGS.items()):
        return False
    added: Any = read_json(path / "added_tokens.json") if (path / "added_tokens.json").is_file() else {}
    if (path / "tokenizer.json").is_file():
        stated = read_bounded_json(path / "tokenizer.json", MAX_BYTES, "tokenizer.json", MAX_VALUES).get("added_tokens")
        if not isinstance(stated or [], list) or not all(isinstance(each, dict) for each in stated or ()):
            return False
        added = {str(each.get("content")): each.get("id") for each in stated or ()}
    return all(name in known or (isinstance(number, int) and number >= rows) for name, number in added.items())


def read_weights(path: Path, budget: Budget) -> tuple[dict[str, Tensor], list[Region]]:
    """All tensors of the folder, by their own names."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{single}.index.json"
        if (path / single).is_file():
            return _read_shards([path / single], budget)
        if index.is_file():
            names = read_json(index).get("weight_map", {})
            shards = sorted({str(shard) for shard in names.values()}) if isinstance(names, dict) else []
            if len(shards) > MAX_FILES:
                raise HoldfastError(f"{index} names {len(shards):,} shards; more than {MAX_FILES:,} are not read")
            if not shards or not all(_SHARD.match(shard) for shard in shards):
                raise HoldfastError(f"{index} names no shards, or shards outside its folder")
            for shard in shards:
                if not (path / shard).is_file():
                    raise HoldfastError(f"{path / shard} is missing")
            tensors, regions = _read_shards([path / shard for shard in shards], budget)
            names = {name: shard for name, shard in names.items() if not BUFFERS.search(str(name))}
            if tensors.keys() != names.keys():
                odd = sorted(tensors.keys() ^ names.keys())[0]
                raise HoldfastError(f"{index} and its shards disagree about {odd}")
            return tensors, regions
    raise HoldfastError(f"{path} has no {' or '.join(WEIGHT_FILES)}")


def _read_shards(files: list[Path], budget: Budget) -> tuple[dict[str, Tensor], list[Region]]:
    tensors: dict[str, Tensor] = {}
    regions = []
    for file in files:
        if file.suffix == ".safetensors":
            found, _, region = read_safetensors(file, BUFFERS.search)
        else:
            loaded = load_torch(map_file(file), budget)
            stored = flatten(loaded.tree, str(file))
            found = {name: tensor.tensor() for name, tensor in stored if not BUFFERS.search(name)}
            region = loaded.region
        twice = tensors.keys() & found.keys()
        if twice:
            raise HoldfastError(f"{file}: {sorted(twice)[0]} is in another shard too")
        tensors |= found
        regions.append(region)
    return tensors, regions


def read_json(path: Path) -> dict[str, Any]:
    """A configuration of the folder, or the index of its shards."""
    return read_bounded_json(path, MAX_JSON_BYTES, path.name)

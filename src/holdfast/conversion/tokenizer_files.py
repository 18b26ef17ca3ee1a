"""The tokenizer's files in a Hugging Face folder, from vocab.json + merges.txt, vocab.txt or a tokenizer.json.

The invariant: transformers gives the ids that training saw; nothing is downloaded that the user did not name.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from holdfast.assets.fetching import resolve
from holdfast.errors import HoldfastError
from holdfast.tokenizers.recipe import END_OF_TEXT, read_recipe

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass
class TokenizerFiles:
    size: int
    source: str
    files: dict[str, bytes] = field(default_factory=dict)
    end_of_text: int | None = None


def read_tokenizer(
    vocab_file: str | None,
    merge_file: str | None,
    tokenizer_model: str | None,
    family: str,
    lower_case: bool,
    positions: int,
) -> TokenizerFiles | None:
    """The files to write for the tokenizer that the flags or the run name (paths, or names of the catalog); None for none."""
    if vocab_file is not None and family == "bert":
        return _word_piece(resolve(vocab_file, "vocab"), lower_case, positions)
    if vocab_file is not None:
        if merge_file is None:
            raise HoldfastError(f"{vocab_file} needs its merges: give --merge-file")
        return _byte_level(resolve(vocab_file, "vocab"), resolve(merge_file, "merges"), positions)
    if tokenizer_model is not None:
        return _ready_made(resolve(tokenizer_model), positions)
    return None


def _byte_level(vocab: Path, merges: Path, positions: int) -> TokenizerFiles:
    recipe = read_recipe("GPT2BPETokenizer", vocab, merges)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
        **{f"{name}_token": END_OF_TEXT for name in ("bos", "eos", "unk")},
    }
    files = {
        "vocab.json": vocab.read_bytes(),
        "merges.txt": merges.read_bytes(),
        "tokenizer.json": recipe.definition.encode(),
        "tokenizer_config.json": to_json(config),
    }
    return TokenizerFiles(recipe.vocab_size, str(vocab), files, recipe.eod)


def _word_piece(vocab: Path, lower_case: bool, positions: int) -> TokenizerFiles:
    recipe = read_recipe("BertWordPieceLowerCase" if lower_case else "BertWordPieceCase", vocab)
    definition = orjson.loads(recipe.definition)
    # Training adds [CLS] and [SEP] to its samples itself; a user of transformers expects the tokenizer to.
    template: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [_special("[CLS]", 0), _sequence("A", 0), _special("[SEP]", 0)],
        "pair": [
            _special("[CLS]", 0),
            _sequence("A", 0),
            _special("[SEP]", 0),
            _sequence("B", 1),
            _special("[SEP]", 1),
        ],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in (("[CLS]", recipe.cls), ("[SEP]", recipe.sep))
        },
    }
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower_case,
        "model_max_length": positions,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    }
    files = {
        "vocab.txt": vocab.read_bytes(),
        "tokenizer.json": orjson.dumps({**definition, "post_processor": template}),
        "tokenizer_config.json": to_json(config),
    }
    return TokenizerFiles(recipe.vocab_size, str(vocab), files)


def _special(name: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": kind}}


def _sequence(name: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}


def _ready_made(path: Path, positions: int) -> TokenizerFiles:
    """A tokenizer.json, or a folder with one: taken over as it is, with its own configuration."""
    main = path / "tokenizer.json" if path.is_dir() else path
    if main.suffix != ".json":
        raise HoldfastError(f"{main} is not a tokenizer.json; convert SentencePiece and tiktoken models to one first")
    recipe = read_recipe("HuggingFaceTokenizer", tokenizer_model=main)
    names = ("tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
    files = {name: (main.parent / name).read_bytes() for name in names if (main.parent / name).is_file()}
    default = to_json({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions})
    files = {"tokenizer_config.json": default, **files, "tokenizer.json": main.read_bytes()}
    return TokenizerFiles(recipe.vocab_size, str(main), files, recipe.eod)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()

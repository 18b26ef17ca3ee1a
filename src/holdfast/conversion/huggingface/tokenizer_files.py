"""The tokenizer's files in a Hugging Face folder, from vocab.json + merges.txt, vocab.txt or a tokenizer.json.

The invariant: transformers gives the same ids as in training; only files that the user names are downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.system.bounded_files import count_json_values, read_bounded
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers.folder import FILE_KEYS, recipe_of
from holdfast.tokenizers.recipe import END_OF_TEXT, read_recipe, source_files

# The types that go with --tokenizer-model and with --vocab-file, the likeliest first.
BY_MODEL = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
)
BY_VOCABULARY = {"gpt": ("GPT2BPETokenizer",), "bert": ("BertWordPieceLowerCase", "BertWordPieceCase")}
MAX_BYTES = 64 << 20
MAX_VALUES = 3_000_000
"""In a tokenizer's file; Gemma's vocabulary of 256,000 with 580,000 merges as pairs has 2 million."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass
class TokenizerFiles:
    size: int
    source: str
    names: dict[str, str]
    """tokenizer_type, vocab_file, merge_file, tokenizer_model as far as it has them; files as paths."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What goes into a Hugging Face folder."""
    begin_of_text: int | None = None
    end_of_text: int | None = None
    notes: list[str] = field(default_factory=list)


def choose_tokenizer(source: Mapping[str, str], family: str, **given: str | None) -> dict[str, str]:
    """The names of the tokenizer: what the user gave, else what the source names. Empty if neither names a file.

    The type is that of the user or the source where it goes with the files, else what the files show.
    """
    flags = {key: value for key, value in given.items() if value is not None}
    wanted = flags.pop("tokenizer_type", None)
    files = flags or {key: source[key] for key in FILE_KEYS if key in source}
    if not files:
        return {}
    fits = BY_MODEL if "vocab_file" not in files else BY_VOCABULARY[family]
    named = source.get("tokenizer_type", "")
    return {**files, "tokenizer_type": wanted or (named if named in fits else _type_of_files(files, fits))}


def _type_of_files(files: Mapping[str, str], fits: tuple[str, ...]) -> str:
    if "vocab_file" in files or Path(files.get("tokenizer_model", "")).is_dir():
        return fits[0]
    endings = {".model": "SentencePieceTokenizer", ".tiktoken": "TikTokenizer"}
    return endings.get(Path(files.get("tokenizer_model", "")).suffix, fits[0])


def read_tokenizer(names: Mapping[str, str], positions: int) -> TokenizerFiles:
    """The files to write for a tokenizer (paths, or names of the catalog)."""
    kind = names["tokenizer_type"]
    paths = {key: path for key, (_, path) in source_files(kind, *(names.get(key) for key in FILE_KEYS)).items()}
    found = {"tokenizer_type": kind, **{key: str(path) for key, path in paths.items() if key in FILE_KEYS}}
    for path in paths.values():
        check_size(path)
    if kind == "GPT2BPETokenizer":
        return _byte_level(found, paths["vocab_file"], paths["merge_file"], positions)
    if kind in BY_VOCABULARY["bert"]:
        return _word_piece(found, paths["vocab_file"], kind == "BertWordPieceLowerCase", positions)
    if kind == "HuggingFaceTokenizer":
        return _from_tokenizer_json(found, paths["tokenizer_model"], positions)
    return _copied(found, paths["tokenizer_model"])


def check_size(path: Path) -> None:
    """Refuses what is not a regular file of a size that a tokenizer's files can have."""
    if count_json_values(read_bounded(path, MAX_BYTES, "file of a tokenizer")) > MAX_VALUES:
        raise HoldfastError(f"{path} has more than {MAX_VALUES:,} values, which no tokenizer has")


def _byte_level(names: dict[str, str], vocab: Path, merges: Path, positions: int) -> TokenizerFiles:
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
    return TokenizerFiles(recipe.vocab_size, str(vocab), names, files, recipe.bos, recipe.eod)


def _word_piece(names: dict[str, str], vocab: Path, lower_case: bool, positions: int) -> TokenizerFiles:
    recipe = read_recipe("BertWordPieceLowerCase" if lower_case else "BertWordPieceCase", vocab)
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    definition = Tokenizer.from_str(recipe.definition)
    # Training adds [CLS] and [SEP] to its samples itself; a user of transformers expects the tokenizer to.
    definition.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", recipe.cls), ("[SEP]", recipe.sep)],
    )
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lower_case,
        "model_max_length": positions,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    }
    files = {
        "vocab.txt": vocab.read_bytes(),
        "tokenizer.json": definition.to_str().encode(),
        "tokenizer_config.json": to_json(config),
    }
    return TokenizerFiles(recipe.vocab_size, str(vocab), names, files)


def _from_tokenizer_json(names: dict[str, str], main: Path, positions: int) -> TokenizerFiles:
    """A tokenizer.json is copied as it is, with its own configuration."""
    recipe = read_recipe("HuggingFaceTokenizer", tokenizer_model=main)
    extra = ("tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
    files = {
        name: read_bounded(main.parent / name, MAX_BYTES, "file of a tokenizer")
        for name in extra
        if (main.parent / name).is_file()
    }
    default = to_json({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions})
    files = {"tokenizer_config.json": default, **files, "tokenizer.json": main.read_bytes()}
    return TokenizerFiles(recipe.vocab_size, str(main), names, files, recipe.bos, recipe.eod)


def _copied(names: dict[str, str], model: Path) -> TokenizerFiles:
    """SentencePiece and tiktoken models: no tokenizer.json is made of them, whose ids might differ."""
    recipe = recipe_of(names)
    stored = model.name if recipe.family == "tiktoken" else "tokenizer.model"
    note = f"{stored} is copied as it is; transformers needs a tokenizer.json made of it to give the same ids"
    files = {stored: model.read_bytes()}
    return TokenizerFiles(recipe.vocab_size, str(model), names, files, recipe.bos, recipe.eod, [note])


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n").encode()

"""What a tokenizer is, read from its files: definition, vocabulary size, special ids and a digest, without loading an engine.

The invariant: two recipes with one digest give the same ids for every text.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import orjson

from holdfast.system.errors import HoldfastError, UsageError

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MERGE = re.compile(r"^(?!#version)[^ \n]* [^ \n]*$", re.MULTILINE)
SPECIAL_NAMES = ("special_tokens_map.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Recipe:
    """Enough to build the tokenizer again in another process."""

    tokenizer_type: str
    family: Literal["json", "sentencepiece", "tiktoken"]
    definition: str = field(repr=False)
    """The text of a tokenizer.json, or the path of the model file for the other families."""
    vocab_size: int
    eod: int | None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    pad: int | None = None
    bos: int | None = None
    """Begin of a text; GPT-2 has one token for begin and end."""
    special_tokens: bool = False
    """Add what the tokenizer.json's post-processor adds around a text (BOS, [CLS] ... [SEP])."""
    digest: str = ""

    @property
    def looks_like_bert(self) -> bool:
        """Whether the definition may be BERT's; every BERT definition holds this word, so others need no parsing."""
        return self.family == "json" and '"BertPreTokenizer"' in self.definition


def read_recipe(
    tokenizer_type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
    *,
    special_tokens: bool = True,
) -> Recipe:
    files = {
        key: path for key, (_, path) in source_files(tokenizer_type, vocab_file, merge_file, tokenizer_model).items()
    }
    if tokenizer_type == "GPT2BPETokenizer":
        return _gpt2(files["vocab_file"], files["merge_file"])
    if tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        return _bert(files["vocab_file"], tokenizer_type)
    model = files["tokenizer_model"]
    if tokenizer_type == "HuggingFaceTokenizer":
        return _hugging_face(model, special_tokens)
    if tokenizer_type == "TikTokenizer":
        from holdfast.tokenizers.tiktoken_files import read_tiktoken

        content = _read(model)
        tiktoken = read_tiktoken(str(model), content)
        return Recipe(
            tokenizer_type, "tiktoken", str(model), tiktoken.vocab_size, tiktoken.eod, digest=_digest(content)
        )
    return _sentencepiece(model, tokenizer_type)


def source_files(
    tokenizer_type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    tokenizer_model: str | Path | None = None,
) -> dict[str, tuple[str, Path]]:
    """The files that decide the ids: flag → (usual file name, path). Catalog names and URLs are fetched.

    Files beside a tokenizer.json that name its special tokens have their own names as keys.
    """
    if tokenizer_type == "GPT2BPETokenizer":
        vocabulary = needed_file(vocab_file, "--vocab-file", tokenizer_type)
        # A catalog name stands for both files.
        merges = vocab_file if merge_file is None and not Path(str(vocab_file)).exists() else merge_file
        return {
            "vocab_file": ("vocab.json", vocabulary),
            "merge_file": ("merges.txt", needed_file(merges, "--merge-file", tokenizer_type)),
        }
    if tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        return {"vocab_file": ("vocab.txt", needed_file(vocab_file, "--vocab-file", tokenizer_type))}
    _check_type(tokenizer_type)
    model = needed_file(tokenizer_model, "--tokenizer-model", tokenizer_type)
    if tokenizer_type != "HuggingFaceTokenizer":
        # The name of a tiktoken file says how it splits text.
        return {"tokenizer_model": (model.name if tokenizer_type == "TikTokenizer" else "tokenizer.model", model)}
    model = model / "tokenizer.json" if model.is_dir() else model
    if not model.is_file():
        raise HoldfastError(
            f"{model.parent} holds no {model.name}; --tokenizer-model takes a tokenizer.json or its folder"
        )
    beside = {name: (name, model.parent / name) for name in SPECIAL_NAMES if (model.parent / name).is_file()}
    return {"tokenizer_model": ("tokenizer.json", model), **beside}


def _check_type(tokenizer_type: str) -> None:
    from holdfast.config import TokenizerType  # slow to load, and a worker does not need it

    types: tuple[str, ...] = get_args(TokenizerType)
    if tokenizer_type not in types:
        import difflib

        near = difflib.get_close_matches(tokenizer_type, types, n=1, cutoff=0.4)
        hint = f"; perhaps you meant {near[0]}" if near else ""
        raise UsageError(f"there is no tokenizer type '{tokenizer_type}'{hint} (known: {', '.join(types)})")


def needed_file(path: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """The file behind a flag: a path, or a name of the catalog or a URL that is fetched."""
    if path is None:
        raise UsageError(f"{tokenizer_type} needs {flag}")
    if Path(path).exists():
        return Path(path)
    from holdfast.assets.catalog import is_known, is_url

    if not (is_url(str(path)) or is_known(str(path))):
        raise HoldfastError(f"{path} does not exist ({flag})")
    from holdfast.assets.fetching import resolve

    return resolve(str(path), "merges" if flag == "--merge-file" else "vocab")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HoldfastError(f"cannot read {path}: {error.strerror}") from error


def _digest(*contents: bytes) -> str:
    whole = hashlib.sha256()
    for content in contents:
        whole.update(len(content).to_bytes(8, "little") + content)
    return whole.hexdigest()


def _json(path: Path, content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise HoldfastError(f"{path} is not JSON ({error}); check that it is the right file") from error


def _definition(
    model: dict[str, Any],
    special: dict[str, int],
    *,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
) -> str:
    """The text of a tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in special.items()],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return orjson.dumps(definition).decode()


def _gpt2(vocab_file: Path, merge_file: Path) -> Recipe:
    """GPT-2's byte-level BPE, as Hugging Face's fast tokenizer computes it; <|endoftext|> inside a text is the special token."""
    vocabulary_bytes, merges_bytes = _read(vocab_file), _read(merge_file)
    vocabulary = _json(vocab_file, vocabulary_bytes)
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise HoldfastError(f"{vocab_file} is not the vocab.json of a byte-level BPE: it must map tokens to ids")
    _check_ids(vocab_file, vocabulary)
    # Left as "a b": 50,000 pairs of strings would take a tenth of a second to make, write and read.
    merges = MERGE.findall(merges_bytes.decode("utf-8", "replace").replace("\r\n", "\n"))
    eod = vocabulary.get(END_OF_TEXT, len(vocabulary))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    text = _definition(model, {END_OF_TEXT: eod}, pre_tokenizer=byte_level, decoder=byte_level)
    size = max(max(vocabulary.values()), eod) + 1
    return Recipe(
        "GPT2BPETokenizer", "json", text, size, eod, pad=eod, bos=eod, digest=_digest(vocabulary_bytes, merges_bytes)
    )


def _bert(vocab_file: Path, tokenizer_type: str) -> Recipe:
    """BERT's WordPiece without [CLS] and [SEP] around the text: samples add those. The end of a document is [SEP]."""
    content = _read(vocab_file)
    tokens = content.decode("utf-8", "replace").split("\n")
    if tokens and not tokens[-1]:
        tokens.pop()
    vocabulary = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    missing = [name for name in BERT_SPECIAL if name not in vocabulary]
    if missing:
        raise HoldfastError(f"{vocab_file} is not a BERT vocab.txt: it lacks {', '.join(missing)}")
    pad, _, cls, sep, mask = (vocabulary[name] for name in BERT_SPECIAL)
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": tokenizer_type == "BertWordPieceLowerCase",
    }
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    }
    text = _definition(
        model,
        {name: vocabulary[name] for name in BERT_SPECIAL},
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    digest = _digest(content, tokenizer_type.encode())
    return Recipe(
        tokenizer_type, "json", text, len(tokens), eod=sep, cls=cls, sep=sep, mask=mask, pad=pad, digest=digest
    )


def _hugging_face(file: Path, special_tokens: bool) -> Recipe:
    """A tokenizer.json; tokenizer_config.json beside it names the begin and end tokens of a text."""
    content = _read(file)
    definition = _json(file, content)
    vocabulary, added = _vocabulary_of(file, definition)
    names = _special_names(file.parent)
    eos = names.get("eos_token") or next(
        (name for name in (END_OF_TEXT, "</s>") if name in vocabulary or name in added), None
    )
    ids = {**vocabulary, **added}
    names.setdefault("bos_token", {END_OF_TEXT: END_OF_TEXT, "</s>": "<s>"}.get(eos or "", ""))
    found = {name: ids.get(names.get(f"{name}_token", "")) for name in ("cls", "sep", "mask", "pad", "bos")}
    eod = ids.get(eos) if eos else found["sep"]
    size = max(ids.values(), default=-1) + 1  # ids may have gaps
    digest = _digest(content, str(special_tokens).encode(), str(eod).encode())
    text = content.decode()
    return Recipe(
        "HuggingFaceTokenizer", "json", text, size, eod, **found, special_tokens=special_tokens, digest=digest
    )


def _vocabulary_of(file: Path, definition: Any) -> tuple[dict[str, int], dict[str, int]]:
    try:
        raw = definition["model"]["vocab"]
        vocabulary = {entry[0]: number for number, entry in enumerate(raw)} if isinstance(raw, list) else dict(raw)
        added = {token["content"]: token["id"] for token in definition.get("added_tokens") or []}
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise HoldfastError(f"{file} is not a tokenizer.json: it has no model with a vocabulary") from error
    _check_ids(file, {**vocabulary, **added})
    return vocabulary, added


def adds_beyond(recipe: Recipe, rows: int) -> bool:
    """Whether the tokens with ids from `rows` on are added ones: a model without rows for them is still this tokenizer's."""
    if recipe.family != "json" or recipe.vocab_size <= rows:
        return False
    vocabulary, _ = _vocabulary_of(Path("tokenizer.json"), orjson.loads(recipe.definition))
    return max(vocabulary.values(), default=-1) < rows


def _check_ids(file: Path, vocabulary: dict[Any, Any]) -> None:
    for token, number in vocabulary.items():
        if type(token) is not str or type(number) is not int or not 0 <= number < 1 << 31:
            raise HoldfastError(
                f"{file}: the id of {str(token)[:100]!r} is {str(number)[:100]}; ids are numbers from 0"
            )


def _special_names(folder: Path) -> dict[str, str]:
    """The special tokens that tokenizer_config.json or special_tokens_map.json name, as strings."""
    names: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        path = folder / name
        config = _json(path, path.read_bytes()) if path.is_file() else {}
        for key, value in config.items() if isinstance(config, dict) else ():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                names[key] = content
    return names


def _sentencepiece(model: Path, tokenizer_type: str) -> Recipe:
    from holdfast.tokenizers.engines import load_sentencepiece

    content = _read(model)
    processor = load_sentencepiece(str(model))
    ids = [processor.eos_id(), processor.pad_id(), processor.bos_id()]
    eos, pad, bos = (None if number < 0 else number for number in ids)
    size = processor.get_piece_size()
    return Recipe(tokenizer_type, "sentencepiece", str(model), size, eos, pad=pad, bos=bos, digest=_digest(content))

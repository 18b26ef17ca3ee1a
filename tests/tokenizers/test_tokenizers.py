"""Every tokenizer gives the ids of the library that defines it; the fast engines equal the reference on nasty texts."""

import base64
import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from holdfast.cli import run
from holdfast.data.indexed import dtype_for_vocabulary
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import Tokenizer, build_tokenizer, read_recipe
from holdfast.tokenizers.training import TokenizerKind, train_tokenizer
from tests.data.corpora import NASTY, every_code_point, gpt2_folder

TEXTS = [text for text in NASTY if isinstance(text, str)]
LEARNT = [
    *TEXTS[:4],
    "the quick brown fox jumps over the lazy dog and runs away " * 20,
    "Zażółć gęślą jaźń; ΑΣ ΟΔΥΣΣΕΥΣ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(LEARNT, path, 500)
    train_tokenizer(LEARNT, path, 400, "wordpiece")
    return path


def random_texts(count: int = 200) -> list[str]:
    chance = random.Random(3)
    alphabet = "aZ09 .,'\n\t\r\0\x7f\u00a0é漢ß\u0301Σς\u200b\u3000😀[]<|>-"
    return ["".join(chance.choices(alphabet, k=chance.randrange(60))) for _ in range(count)]


def assert_same(fast: Tokenizer, reference: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        assert fast.encode(text) == reference.encode(text), text[:100]
    ids, offsets = fast.encode_batch(texts)
    assert ids.tolist() == [number for text in texts for number in reference.encode(text)]
    assert offsets.tolist()[-1] == len(ids)


def test_gpt2_equals_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = gpt2_folder() or folder
    oracle = transformers.GPT2TokenizerFast(str(files / "vocab.json"), str(files / "merges.txt"))
    ours = build_tokenizer("GPT2BPETokenizer", files / "vocab.json", files / "merges.txt")
    assert ours.engine.startswith("fastokens")
    assert ours.vocab_size == len(oracle)
    assert ours.eod == oracle.eos_token_id
    for text in [*TEXTS, *random_texts()]:
        assert ours.encode(text) == oracle(text).input_ids
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("lower", [True, False])
def test_bert_equals_transformers(folder: Path, lower: bool) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=lower)
    name = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    ours = build_tokenizer(name, folder / "vocab.txt")
    assert (ours.cls, ours.sep, ours.mask, ours.pad) == (
        oracle.cls_token_id,
        oracle.sep_token_id,
        oracle.mask_token_id,
        oracle.pad_token_id,
    )
    assert ours.eod == ours.sep
    for text in [*TEXTS, *random_texts(), "[CLS] inside [SEP] a text [MASK]ed", "[S\0EP]"]:
        assert ours.encode(text) == oracle(text, add_special_tokens=False).input_ids, text[:100]


@pytest.mark.parametrize("name", ["GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"])
def test_fast_engines_equal_the_reference(folder: Path, name: str) -> None:
    vocabulary = folder / ("vocab.json" if name.startswith("GPT2") else "vocab.txt")
    fast = build_tokenizer(name, vocabulary, folder / "merges.txt", engine="fast")
    reference = build_tokenizer(name, vocabulary, folder / "merges.txt", engine="reference")
    assert not fast.is_reference
    assert reference.engine.startswith("tokenizers")
    specials = ["x [SEP] y", "[UNK]", "a" * 101 + " " + "b" * 100, "<|endoftext|>" * 3]
    assert_same(fast, reference, [*TEXTS, *random_texts(), *specials, *every_code_point(0x3000)])


@pytest.mark.parametrize("name", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_bert_without_tokie_is_the_same(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokie", None)
    monkeypatch.setattr("holdfast.tokenizers.wordpiece.CACHE_ENTRIES", 1000)
    table = build_tokenizer(name, folder / "vocab.txt", engine="fast")
    assert table.engine.startswith("word table")
    reference = build_tokenizer(name, folder / "vocab.txt", engine="reference")
    specials = ["x [SEP] y", "[UNK]", "a" * 101 + " " + "b" * 100]
    assert_same(table, reference, [*LEARNT, *TEXTS, *random_texts(), *specials, *every_code_point(0x3000)])


def test_texts_that_tokie_takes_differently_are_computed_elsewhere(folder: Path) -> None:
    import tokie

    bert = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt", engine="fast")
    assert bert.engine.startswith("tokie")
    reference = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt", engine="reference")
    (folder / "bert.json").write_text(bert.recipe.definition)
    alone = tokie.Tokenizer.from_json(str(folder / "bert.json"))
    rare = "a\u0378b \x7f \u2da7"
    assert alone.encode(rare, False).ids != reference.encode(rare), "nothing is tested if tokie is exact here now"
    mixed = ["plain", rare, "more of it", "x" * 100_000, "[MASK] here", "Σίσυφος"]
    ids, offsets = bert.encode_batch(mixed)
    for number, text in enumerate(mixed):
        assert ids[offsets[number] : offsets[number + 1]].tolist() == reference.encode(text)


@pytest.mark.parametrize("with_tokie", [True, False])
def test_a_word_that_was_added_to_bert_is_found_however_it_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tokie: bool
) -> None:
    definition = build_tokenizer("BertWordPieceLowerCase", folder / "vocab.txt").recipe.definition
    oracle = tokenizers.Tokenizer.from_str(definition)
    oracle.add_tokens(["newword", "zürich", "foo bar"])  # as transformers adds them: normalized
    oracle.save(str(tmp_path / "tokenizer.json"))
    if not with_tokie:
        monkeypatch.setitem(sys.modules, "tokie", None)
    fast = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path, engine="fast", special_tokens=False)
    short = ["a newword b", "a NewWord b", "Zurich, NEWWORD", "Foo\tBar", "plain text"]
    # tokie leaves long texts to others.
    for text in [*short, *(f"{'and so on ' * 4000}{text}" for text in short)]:
        assert fast.encode(text) == oracle.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_json_adds_its_special_tokens_unless_switched_off(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    oracle.save_pretrained(tmp_path)
    whole = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    bare = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path / "tokenizer.json", special_tokens=False)
    for text in TEXTS:
        assert whole.encode(text) == oracle(text).input_ids
        assert bare.encode(text) == oracle(text, add_special_tokens=False).input_ids
    assert whole.sep == oracle.sep_token_id
    assert whole.eod == oracle.sep_token_id


def test_a_byte_level_tokenizer_json_runs_on_the_fast_engine(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    oracle.save_pretrained(tmp_path)
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    assert ours.engine.startswith("fastokens")
    assert ours.eod == oracle.eos_token_id
    assert ours.vocab_size == len(oracle)
    for text in TEXTS:
        assert ours.encode(text) == oracle(text).input_ids


def test_a_sentencepiece_model_gives_its_own_ids(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(["the quick brown fox", "jumps over the lazy dog"] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), vocab_size=30, minloglevel=2
    )
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    for name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        ours = build_tokenizer(name, tokenizer_model=tmp_path / "m.model")
        assert ours.vocab_size == oracle.get_piece_size()
        assert ours.eod == oracle.eos_id()
        for text in ("the lazy fox", "", "jumps  over é"):
            assert ours.encode(text) == oracle.encode_as_ids(text)
        assert ours.decode(ours.encode("the lazy fox")) == "the lazy fox"


def test_a_tiktoken_file_gives_tiktokens_ids(folder: Path, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([number]): number for number in range(256)}
    for number, token in enumerate([b"th", b"he", b" the", b"qu", b"er", b"the"]):
        ranks[token] = 256 + number
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"\n".join(lines))
    ours = build_tokenizer("TikTokenizer", tokenizer_model=tmp_path / "r50k_base.tiktoken")
    from holdfast.tokenizers.tiktoken_files import GPT2_PATTERN

    oracle = tiktoken.Encoding(
        "x", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256}
    )
    assert ours.eod == 50256
    for text in [*TEXTS[:4], "the other<|endoftext|>quarter"]:
        assert ours.encode(text) == oracle.encode(text, allowed_special="all")
        assert ours.decode(ours.encode(text)) == text


def test_the_vocabulary_covers_the_largest_id_of_a_tokenizer_json_with_gaps(tmp_path: Path) -> None:
    """Two bytes per token would not hold these ids."""
    definition = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 70_000}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    recipe = read_recipe("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    assert recipe.vocab_size == 70_001
    assert np.dtype(dtype_for_vocabulary(recipe.vocab_size)).itemsize == 4


def test_a_bert_definition_without_its_unknown_token_is_left_to_the_reference(folder: Path, tmp_path: Path) -> None:
    definition = json.loads(build_tokenizer("BertWordPieceCase", folder / "vocab.txt").recipe.definition)
    definition["model"]["unk_token"] = "[NONE]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    ours = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path)
    assert ours.engine.startswith("tokenizers")


def test_an_empty_tiktoken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r50k_base.tiktoken").touch()
    with pytest.raises(HoldfastError, match="it holds no token"):
        read_recipe("TikTokenizer", tokenizer_model=tmp_path / "r50k_base.tiktoken")


def test_megatrons_tiktoken_json_has_a_thousand_special_tokens_in_front(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokens = [bytes([number]) for number in range(256)] + [b"th", b"the"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    ours = build_tokenizer("TikTokenizer", tokenizer_model=tmp_path / "vocab.json")
    assert ours.encode("the") == [1257]
    assert ours.encode("</s>") == [2] == [ours.eod]
    assert ours.vocab_size == 1258


def test_tokenizers_travel_to_other_processes(folder: Path) -> None:
    ours = build_tokenizer("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt")
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.encode("the quick fox") == ours.encode("the quick fox")
    assert copy.recipe.digest == ours.recipe.digest


def test_another_vocabulary_has_another_digest(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(LEARNT, tmp_path, 380)
    one = build_tokenizer("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt")
    other = build_tokenizer("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert one.recipe.digest != other.recipe.digest


def test_training_is_repeatable_and_of_the_wanted_size(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(LEARNT, tmp_path, 300)
    assert len(json.loads((tmp_path / "vocab.json").read_text())) == 300
    train_tokenizer(LEARNT, tmp_path, 500, overwrite=True)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    vocabulary = json.loads((folder / "vocab.json").read_text())
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert vocabulary["<|endoftext|>"] == len(vocabulary) - 1
    assert (folder / "vocab.txt").read_text().split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_an_existing_tokenizer_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LEARNT))
    command = ["tokenizer", "train", "--input", str(text), "--output-dir", str(tmp_path), "--vocab-size"]
    run([*command, "300"])
    before = (tmp_path / "vocab.json").read_bytes()
    with pytest.raises(HoldfastError, match=r"vocab\.json exists already.*--overwrite"):
        run([*command, "320"])
    assert (tmp_path / "vocab.json").read_bytes() == before
    run([*command, "320", "--overwrite"])
    assert len(json.loads((tmp_path / "vocab.json").read_text())) == 320
    run([*command, "100", "--type", "wordpiece"])  # other files: nothing to replace


@pytest.mark.parametrize(
    ("name", "files", "error", "message"),
    [
        ("GPT2BPETokenizer", {}, UsageError, "needs --vocab-file"),
        ("HuggingFaceTokenizer", {}, UsageError, "needs --tokenizer-model"),
        ("GPT2BPETokenizer", {"vocab_file": "text", "merge_file": "text"}, HoldfastError, "is not JSON"),
        ("BertWordPieceLowerCase", {"vocab_file": "text"}, HoldfastError, r"lacks \[PAD\]"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "list"}, HoldfastError, "not a tokenizer.json"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "."}, HoldfastError, "holds no tokenizer.json"),
        ("SentencePieceTokenizer", {"tokenizer_model": "text"}, HoldfastError, "not a SentencePiece model"),
        ("TikTokenizer", {"tokenizer_model": "text"}, HoldfastError, "does not say how it splits"),
        ("Gpt2", {}, UsageError, "there is no tokenizer type 'Gpt2'"),
    ],
)
def test_wrong_files_are_named(
    tmp_path: Path, name: str, files: dict[str, str], error: type[Exception], message: str
) -> None:
    (tmp_path / "text").write_text("just words\n")
    (tmp_path / "list").write_text("[]")
    with pytest.raises(error, match=message):
        build_tokenizer(name, **{flag: tmp_path / path for flag, path in files.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "texts", "message"), [(100, LEARNT, "too small"), (300, ["", ""], "no text")])
def test_training_refuses_what_cannot_work(tmp_path: Path, size: int, texts: list[str], message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        train_tokenizer(texts, tmp_path, size)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-cased"])
def test_a_wordpiece_vocabulary_is_the_same_every_time_and_no_larger_than_asked(
    tmp_path: Path, kind: TokenizerKind
) -> None:
    """As special tokens the pieces that continue words have an order; without that the library gives another file each time."""
    texts = [*LEARNT, *random_texts(), "漢字と仮名の文 한국어 Ελληνικά"]
    sizes = {}
    for size in (7, 60, 400, 5000):
        files = [
            train_tokenizer(given, tmp_path / f"{size}-{number}", size, kind)[0].read_bytes()
            for number, given in enumerate((texts, iter(texts), texts))
        ]
        assert len(set(files)) == 1
        sizes[size] = len(files[0].splitlines())
    assert sizes[7] == 7 and 55 <= sizes[60] <= 60 and sizes[400] == 400 and sizes[5000] <= 5000
    with pytest.raises(UsageError, match="starts at 7"):
        train_tokenizer(texts, tmp_path / "none", 6, kind)


def test_a_vocabulary_too_small_for_all_characters_keeps_the_frequent_ones(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat " * 50, "".join(map(chr, range(0x3B1, 0x3C9)))]
    (vocab,) = train_tokenizer(texts, tmp_path, 30, "wordpiece")
    pieces = set(vocab.read_text().splitlines())
    assert {"t", "##a"} <= pieces and not pieces & set(texts[1])
    assert {"the", "cat"} & pieces, "room is left for words"

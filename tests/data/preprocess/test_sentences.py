"""Sentences: a sequence each, the bytes of Megatron's writer for the same sentences, nothing of the text lost."""

import json
from pathlib import Path

import pytest

from holdfast import preprocess
from holdfast.data.preprocess.sentences import SentenceSplitter
from holdfast.system.errors import UsageError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import NASTY, dataset_bytes, megatron_bytes, megatron_documents, pair, prose

STORY = "Dr. Smith arrived at 3.30 p.m. He was late! Why?\n\nNo one knew.  The End"


def test_sentences_end_where_a_reader_would_end_them() -> None:
    assert SentenceSplitter("english").split("Mr. Brown is here. He sat down.") == [
        "Mr. Brown is here.",
        "He sat down.",
    ]
    assert SentenceSplitter("de").split("Das ist z. B. gut. Ja!") == ["Das ist z. B. gut.", "Ja!"]
    assert SentenceSplitter("en").split("") == []


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_but_blanks_is_lost(keep: bool) -> None:
    splitter = SentenceSplitter("english", keep)
    for text in [
        STORY,
        *(text for text in NASTY if isinstance(text, str)),
        *(json.loads(line)["text"] for line in prose(50)),
    ]:
        pieces = splitter.split(text)
        assert "".join("".join(pieces).split()) == "".join(text.split())
        assert all(piece.strip() for piece in pieces)
        if keep:
            assert "".join(pieces).count("\n") == text.lstrip().rstrip(" \t").count("\n")


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(UsageError, match="--lang klingon1"):
        SentenceSplitter("klingon1")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sequence_per_sentence_as_megatron_writes_them(tmp_path: Path, bert: TokenizerFiles, workers: int) -> None:
    texts = [STORY, "", "One. Two. Three.", ["given", "as a list."], *(json.loads(line)["text"] for line in prose(100))]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    summary = preprocess(source, tmp_path / "out", **bert.arguments(), split_sentences=True, workers=workers)  # type: ignore[arg-type]
    assert summary.outputs == (f"{tmp_path}/out_text_sentence",)
    assert summary.engine.startswith("tokie")
    splitter = SentenceSplitter("english")
    split = [json.dumps({"text": splitter.split(text) if isinstance(text, str) else text}).encode() for text in texts]
    documents = megatron_documents(split, "text", bert.build(), False)
    assert pair(tmp_path / "out_text_sentence") == dataset_bytes(documents)
    oracle = megatron_bytes(documents, tmp_path)
    assert oracle is None or pair(tmp_path / "out_text_sentence") == oracle


def test_cased_bert_with_newlines_kept(tmp_path: Path, bert_cased: TokenizerFiles) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": STORY}))
    preprocess(
        source, tmp_path / "out", **bert_cased.arguments(), split_sentences=True, keep_newlines=True, append_eod=True
    )  # type: ignore[arg-type]
    split = [json.dumps({"text": SentenceSplitter("english", True).split(STORY)}).encode()]
    assert pair(tmp_path / "out_text_sentence") == dataset_bytes(
        megatron_documents(split, "text", bert_cased.build(), True)
    )


BLANKS = [chr(code) for code in range(0x80, 0x3001) if chr(code).isspace()]


@pytest.mark.parametrize("language", ["en", "de", "fr", "ru", "ja", "hi", "xx"])
@pytest.mark.parametrize("keep", [True, False])
def test_blanks_of_every_kind_may_stand_before_a_period(language: str, keep: bool) -> None:
    """sentencex panics at some of them, which ended the run."""
    splitter = SentenceSplitter(language, keep)
    for blank in BLANKS:
        for text in (f"He is A{blank}. B is here. Yes.", f"A{blank * 3}.", f"{blank}.{blank}", f"C{blank}\n{blank}. D"):
            assert "".join("".join(splitter.split(text)).split()) == "".join(text.split())
    assert splitter.split("He is A\xa0. Yes it is.")[0].startswith("He is A\xa0.")


def test_a_document_with_an_odd_blank_before_a_period_does_not_end_the_run(
    tmp_path: Path, bert: TokenizerFiles
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "The vitamin C\\u00a0. It is good."}\n')
    summary = preprocess(source, tmp_path / "out", **bert.arguments(), split_sentences=True)  # type: ignore[arg-type]
    assert summary.documents == 1 and summary.sequences >= 1


def test_many_blanks_take_no_longer_than_other_text() -> None:
    text = "\u3000" * 200_000 + "The end."
    assert SentenceSplitter("en").split(text) == ["The end."]

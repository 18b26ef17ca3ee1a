"""`bench preprocess` measures every part, on a corpus small enough for a test."""

import orjson
import pytest

from holdfast.bench import preprocess
from holdfast.bench.preprocess import PreprocessBench
from holdfast.system.errors import UsageError
from holdfast.tokenizers.training import train_tokenizer

SENTENCES = [f"The {word} is read. It is written again, {number} times." for number, word in enumerate(dir(str))]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b"".join(orjson.dumps({"text": sentence}) + b"\n" for sentence in SENTENCES * 40))
    vocab, merges = train_tokenizer(SENTENCES, folder / "bpe", 300, "bpe")
    (bert,) = train_tokenizer(SENTENCES, folder / "wordpiece", 300, "wordpiece")
    return {"corpus": corpus, "vocab_file": str(vocab), "merge_file": str(merges), "bert_vocab_file": str(bert)}


def test_every_part_is_measured_and_the_peers_write_the_same_bytes(files):
    tables = preprocess.run(PreprocessBench(**files, against=("tiktoken", "tokenizers"), large_mb=1, rounds=1))
    titles = [title.split(":")[0] for title in tables]
    assert sorted(titles) == sorted(preprocess.PARTS)
    race, start_up, *_, large, sentences = tables.values()
    assert [(row["tool"], row["same bytes"]) for row in race] == [
        ("holdfast", "yes"),
        ("tiktoken", "yes"),
        ("tokenizers", "yes"),
    ]
    assert all(row["peak MB"] > 10 and row["CPU s"] > 0 for row in race)
    assert start_up[0]["wall s"] > 0
    assert large[1]["MB"] == 1 and sentences[0]["tool"] == "holdfast"


@pytest.mark.slow
def test_only_the_parts_asked_for_are_measured(files):
    assert [
        title.split(":")[0] for title in preprocess.run(PreprocessBench(**files, parts=("start-up",), rounds=1))
    ] == ["start-up"]


def test_unknown_peers_and_parts_are_refused(files):
    with pytest.raises(UsageError, match="there is no contender 'hope'; there are: tiktoken, tokenizers, gigatoken"):
        preprocess.run(PreprocessBench(**files, against=("hope",)))
    with pytest.raises(UsageError, match="there is no part 'sprint'; there are: race, start-up"):
        preprocess.run(PreprocessBench(**files, parts=("sprint",)))

"""`preprocess` writes Megatron's bytes, whatever the text, the keys, the workers and the tokenizer."""

import json
import signal
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.data.preprocess.build as module
from holdfast import IndexedDataset, preprocess
from holdfast.data.preprocess.encode import _insert
from holdfast.data.preprocess.options import PreprocessOptions
from holdfast.data.preprocess.provenance import tokenizer_of_data
from holdfast.system.errors import HoldfastError, UsageError
from tests.data.conftest import TokenizerFiles
from tests.data.corpora import (
    dataset_bytes,
    every_code_point,
    megatron_bytes,
    megatron_documents,
    nasty_lines,
    pair,
    prose,
)
from tests.grids import mostly_slow


def write_lines(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    path.write_bytes(b"\n".join(lines) + end)
    return path


@pytest.mark.parametrize(
    ("workers", "append_eod"),
    mostly_slow([(w, eod) for w in (1, 2, 5) for eod in (True, False)], [(1, False), (5, True)]),
)
def test_a_nasty_corpus_gives_megatrons_bytes(
    tmp_path: Path, gpt2: TokenizerFiles, workers: int, append_eod: bool
) -> None:
    lines = nasty_lines() + prose(30)
    source = write_lines(tmp_path / "nasty.jsonl", lines, b"")
    summary = preprocess(source, tmp_path / "out", **gpt2.arguments(), append_eod=append_eod, workers=workers)  # type: ignore[arg-type]
    documents = megatron_documents(lines, "text", gpt2.build(), append_eod)
    written = pair(tmp_path / "out_text_document")
    assert written == dataset_bytes(documents)
    oracle = megatron_bytes(documents, tmp_path)
    assert oracle is None or written == oracle
    assert summary.documents == len(lines)
    assert summary.tokens == sum(len(sequence) for document in documents for sequence in document)
    assert "fastokens" in summary.engine


@pytest.mark.slow
def test_every_code_point_below_30000_in_context_gives_megatrons_bytes(tmp_path: Path, gpt2: TokenizerFiles) -> None:
    lines = [json.dumps({"text": text}).encode() for text in every_code_point()]
    source = write_lines(tmp_path / "points.jsonl", lines)
    preprocess(source, tmp_path / "out", **gpt2.arguments(), append_eod=True, workers=2)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == dataset_bytes(megatron_documents(lines, "text", gpt2.build(), True))


def test_order_is_kept_over_many_units_and_workers(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    # 3 MB in units of 256 KB: cuts fall anywhere in lines, and five workers finish them out of order.
    lines = prose(3000)
    source = write_lines(tmp_path / "prose.jsonl", lines)
    assert source.stat().st_size > 8 * (256 << 10)
    results = []
    for workers in (1, 2, 5):
        prefix = tmp_path / f"out{workers}"
        preprocess(source, prefix, **small_bpe.arguments(), append_eod=True, workers=workers)  # type: ignore[arg-type]
        results.append(pair(f"{prefix}_text_document"))
    assert results[0] == results[1] == results[2]
    dataset = IndexedDataset(tmp_path / "out1_text_document")
    tokenizer = small_bpe.build()
    for number in (0, 1, 1500, 2999):
        assert tokenizer.decode(dataset[number][:-1].tolist()) == json.loads(lines[number])["text"]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_line_ends_do_not_matter(tmp_path: Path, small_bpe: TokenizerFiles, ending: bytes) -> None:
    lines = [json.dumps({"text": text}).encode() for text in ("one", "two", "three")]
    joiner = ending or b"\n"
    (tmp_path / "a.jsonl").write_bytes(joiner.join(lines) + ending)
    preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == dataset_bytes(
        megatron_documents(lines, "text", small_bpe.build(), False)
    )


def test_blank_lines_are_passed_over(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "one"}\n\n  \n{"text": "two"}\n\n')
    summary = preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert (summary.documents, summary.bad_lines) == (2, 0)


def test_several_keys_make_a_dataset_each(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    lines = [json.dumps({"title": f"title {n}", "body": ["s one", "", f"s {n}"], "x": 0}).encode() for n in range(50)]
    source = write_lines(tmp_path / "a.jsonl", lines)
    summary = preprocess(
        source, tmp_path / "out", **small_bpe.arguments(), json_keys=["title", "body"], append_eod=True
    )  # type: ignore[arg-type]
    assert [Path(output).name for output in summary.outputs] == ["out_title_document", "out_body_document"]
    for key in ("title", "body"):
        expected = dataset_bytes(megatron_documents(lines, key, small_bpe.build(), True))
        assert pair(tmp_path / f"out_{key}_document") == expected


def test_a_large_vocabulary_takes_four_bytes_per_token(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    vocabulary = json.loads(small_bpe.vocab_file.read_text())
    vocabulary |= {f"filler{number}": number for number in range(len(vocabulary), 65500)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    files = TokenizerFiles("GPT2BPETokenizer", tmp_path / "vocab.json", small_bpe.merge_file)
    lines = [b'{"text": "four bytes"}']
    source = write_lines(tmp_path / "a.jsonl", lines)
    preprocess(source, tmp_path / "out", **files.arguments(), append_eod=True)  # type: ignore[arg-type]
    documents = megatron_documents(lines, "text", files.build(), True)
    assert pair(tmp_path / "out_text_document") == dataset_bytes(documents, "<i4", 4)
    oracle = megatron_bytes(documents, tmp_path, np.int32)
    assert oracle is None or pair(tmp_path / "out_text_document") == oracle


def test_the_reference_engine_gives_the_same_bytes(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = write_lines(tmp_path / "a.jsonl", nasty_lines())
    engines = []
    for engine in ("fast", "reference"):
        summary = preprocess(source, tmp_path / engine, **small_bpe.arguments(), tokenizer_engine=engine)  # type: ignore[arg-type]
        engines.append(summary.engine.split()[0])
    assert engines == ["fastokens", "tokenizers"]
    assert pair(tmp_path / "fast_text_document") == pair(tmp_path / "reference_text_document")


def test_a_small_input_does_not_wait_for_the_fast_engine(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    lines = [b'{"text": "one two three"}'] * 10
    small = preprocess(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "small", **small_bpe.arguments())  # type: ignore[arg-type]
    large = preprocess(write_lines(tmp_path / "b.jsonl", lines * 300), tmp_path / "large", **small_bpe.arguments())  # type: ignore[arg-type]
    assert [summary.engine.split()[0] for summary in (small, large)] == ["tokenizers", "fastokens"]


@pytest.mark.parametrize("times", [1, 3000], ids=["short", "long"])
def test_the_first_token_that_differs_from_the_reference_ends_the_run(
    tmp_path: Path, small_bpe: TokenizerFiles, times: int
) -> None:
    """Of a long text, the beginning is compared."""
    # A fast engine that errs cannot be had: its samples are forged where the run compares them.
    text = "one two three" * times
    source = write_lines(tmp_path / "a.jsonl", [json.dumps({"text": text}).encode()])
    seen: list[tuple[str, bytes]] = []

    class Forged(module.CrossCheck):
        def compare(self, samples: list[tuple[str, bytes]]) -> None:  # type: ignore[override]
            seen.extend(samples)
            super().compare([(text + "!", ids) for text, ids in samples])

    original, module.CrossCheck = module.CrossCheck, Forged  # type: ignore[misc]
    try:
        with pytest.raises(
            HoldfastError, match=r"different tokens for the text 'one two three.*--tokenizer-engine reference"
        ):
            preprocess(source, tmp_path / "out", **small_bpe.arguments(), tokenizer_engine="fast")  # type: ignore[arg-type]
    finally:
        module.CrossCheck = original  # type: ignore[misc]
    ((sample, ids),) = seen
    assert text.startswith(sample) and (sample == text or len(sample) >= 512)
    assert np.frombuffer(ids, np.uint32).tolist() == small_bpe.build().encode(sample)
    assert not list(tmp_path.glob("out_text*"))


def test_the_library_function_takes_every_option_of_the_verb_as_a_keyword(tmp_path: Path) -> None:
    values = {one.name: one.default for one in fields(PreprocessOptions) if one.default is not MISSING}
    del values["tokenizer_hf_no_include_special_tokens"]
    with pytest.raises(UsageError, match="needs --vocab-file"):
        preprocess("a.jsonl", tmp_path / "out", **values, include_special_tokens=False)
    with pytest.raises(TypeError, match="append_end"):
        preprocess("a.jsonl", tmp_path / "out", append_end=True)


def test_the_tokenizer_of_data_is_found_as_long_as_the_data_is_there(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = write_lines(tmp_path / "a.jsonl", [b'{"text": "one two"}'])
    preprocess(source, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    found = tokenizer_of_data(tmp_path / "out_text_document")
    assert found is not None and found["digest_sha256"] == small_bpe.build().recipe.digest
    (tmp_path / "out_text_document.bin").unlink()
    assert tokenizer_of_data(tmp_path / "out_text_document") is None


def test_the_provenance_says_what_was_made_of_what(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = write_lines(tmp_path / "a.jsonl", [b'{"text": "one two"}'])
    summary = preprocess(source, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["summary"]["tokens"] == summary.tokens
    assert record["tokenizer"]["vocab_size"] == 1000
    assert len(record["tokenizer"]["digest_sha256"]) == 64
    assert len(record["input_digests_xxh3_128"][str(source)]) == 32
    assert record["versions"]["fastokens"]
    assert record["settings"]["inputs"][0]["size"] == source.stat().st_size
    again = preprocess(source, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert again.already_complete
    assert again.tokens == summary.tokens


def test_an_input_named_as_the_provenance_is_left_alone(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = write_lines(tmp_path / "corpus.json", [b'{"text": "one two"}'])
    before = source.read_bytes()
    preprocess(source, tmp_path / "corpus", **small_bpe.arguments())  # type: ignore[arg-type]
    assert source.read_bytes() == before
    assert json.loads((tmp_path / "corpus.provenance.json").read_text())["summary"]["documents"] == 1


def test_another_dataset_under_the_prefix_is_not_replaced_unasked(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    first = write_lines(tmp_path / "a.jsonl", [b'{"text": "one"}'])
    second = write_lines(tmp_path / "b.jsonl", [b'{"text": "another one"}'])
    preprocess(first, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    before = pair(tmp_path / "out_text_document")
    with pytest.raises(HoldfastError, match="--overwrite"):
        preprocess(second, tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") == before
    preprocess(second, tmp_path / "out", **small_bpe.arguments(), overwrite=True)  # type: ignore[arg-type]
    assert pair(tmp_path / "out_text_document") != before
    assert not list(tmp_path.glob("*.preprocessing"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": "absent.jsonl"}, HoldfastError, "absent.jsonl does not exist"),
        ({"input": "no/*.jsonl"}, HoldfastError, "no file matches"),
        ({"vocab_file": "absent.json"}, HoldfastError, "absent.json does not exist"),
        ({"merge_file": None}, UsageError, "needs --merge-file"),
        ({"tokenizer_type": "GPT2"}, UsageError, "perhaps you meant GPT2BPETokenizer"),
        ({"json_keys": ["text", "text"]}, UsageError, "different keys"),
        ({"workers": 0}, UsageError, "must be at least 1"),
        ({"partition_index": 0}, UsageError, "--partitions"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, small_bpe: TokenizerFiles, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [b'{"text": "one"}'])
    everything = {"input": source, "output_prefix": tmp_path / "out", **small_bpe.arguments(), **arguments}
    with pytest.raises(error, match=message):
        preprocess(**everything)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out*"))


def test_an_empty_corpus_is_refused(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(HoldfastError, match="no document found"):
        preprocess(tmp_path / "a.jsonl", tmp_path / "out", **small_bpe.arguments())  # type: ignore[arg-type]
    assert not (tmp_path / "out_text_document.idx").exists()


def test_the_command_never_imports_torch(tmp_path: Path, small_bpe: TokenizerFiles) -> None:
    source = write_lines(tmp_path / "a.jsonl", [b'{"text": "one"}'])
    arguments = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out"), *small_bpe.flags()]
    code = "import sys; from holdfast.cli import run; run(sys.argv[1:]); assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/out_text_document\n"


def test_log_interval_prints_megatrons_lines(
    tmp_path: Path, small_bpe: TokenizerFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", prose(250))
    preprocess(source, tmp_path / "out", **small_bpe.arguments(), log_interval=100)  # type: ignore[arg-type]
    printed = capsys.readouterr().err
    assert "Processed 200 documents (" in printed
    assert "docs/s, " in printed


def test_a_tokenizer_is_trained_from_the_same_inputs(tmp_path: Path) -> None:
    import gzip

    source = tmp_path / "in"
    source.mkdir()
    write_lines(source / "a.jsonl", prose(50))
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(prose(50, seed=9))))
    (source / "c.txt").write_text("some plain text, too")
    words = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "tokenizer",
        "train",
        "--input",
        str(source),
        "--vocab-size",
        "300",
    ]
    for kind, names in (("bpe", ["vocab.json", "merges.txt"]), ("wordpiece", ["vocab.txt"])):
        done = subprocess.run(
            [*words, "--type", kind, "--output-dir", str(tmp_path / kind)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(tmp_path / kind / name) for name in names]
    assert len(json.loads((tmp_path / "bpe/vocab.json").read_text())) == 300
    bad = subprocess.run(
        [*words, "--output-dir", str(tmp_path / "x"), "--json-keys", "body"], capture_output=True, text=True
    )
    assert bad.returncode == 1
    assert f"{source / 'a.jsonl'}:1: bad line at byte 0: " in bad.stderr and "no key 'body'" in bad.stderr


def test_a_tokenizer_is_trained_past_bad_lines_and_from_standard_input(tmp_path: Path) -> None:
    lines = prose(60)
    source = tmp_path / "a.jsonl"
    write_lines(source, [*lines[:40], b"{", *lines[40:]])
    words = [sys.executable, "-m", "holdfast.cli", "tokenizer", "train", "--type", "wordpiece", "--vocab-size", "300"]

    def train(input: str, name: str, *more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*words, "--input", input, "--output-dir", str(tmp_path / name), *more],
            capture_output=True,
            input=b"\n".join(lines),
        )

    bad = train(str(source), "x")
    assert bad.returncode == 1
    assert f"{source}:41: bad line at byte {sum(map(len, lines[:40])) + 40}: ".encode() in bad.stderr
    assert not (tmp_path / "x").exists()
    past = train(str(source), "past", "--on-bad-line", "skip", "--json")
    assert past.returncode == 3 and b"1 bad line was left out" in past.stderr
    assert json.loads(past.stdout) == {"files": [str(tmp_path / "past/vocab.txt")], "bad_lines": 1}
    assert train("-", "piped").returncode == 0
    assert (tmp_path / "piped/vocab.txt").read_bytes() == (tmp_path / "past/vocab.txt").read_bytes()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_control_c_ends_a_training_whose_input_does_not_end(tmp_path: Path, kind: str) -> None:
    words = [sys.executable, "-m", "holdfast.cli", "tokenizer", "train", "--input", "-", "--vocab-size", "300"]
    process = subprocess.Popen(
        [*words, "--type", kind, "--output-dir", str(tmp_path / "out")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stderr
    line = prose(1)[0] + b"\n"
    process.stdin.write(line * (4_000_000 // len(line)))  # far more than a pipe holds: most of it has been read
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read().decode().startswith("holdfast: error: interrupted")
    assert not (tmp_path / "out").exists()
    process.stdin.close()
    process.stderr.close()


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(0, 5), max_size=20), scale=st.sampled_from([1, 1000]), ended=st.booleans())
def test_a_token_goes_behind_each_document_short_or_long(lengths: list[int], scale: int, ended: bool) -> None:
    positions = np.unique(np.cumsum(np.array(lengths, np.int64) * scale))
    ids = np.arange(int(positions.max(initial=0)) + (0 if ended else 3), dtype=np.uint32)
    got = _insert(ids, positions, 7, np.uint16)
    assert got.dtype == np.uint16 and np.array_equal(got, np.insert(ids.astype(np.uint16), positions, 7))

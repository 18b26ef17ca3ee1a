"""A run is the same run wherever it, its data and its tokenizer lie, and another run if their content is another."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import convert, preprocess
from holdfast.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, config_to_toml, read_config
from holdfast.data.fingerprint import fingerprint
from holdfast.inspection import inspect_path
from holdfast.system.errors import HoldfastError
from holdfast.tokenizers import read_recipe
from holdfast.tokenizers.folder import read_folder
from holdfast.tokenizers.training import train_tokenizer
from holdfast.train.checks.preflight import check_data, resolve
from holdfast.train.command import parse
from holdfast.train.run_folder.identity import carry_identity, read_run_config
from holdfast.train.run_folder.opening import open_run_folder

TEXTS = [f"the quick brown fox number {number} jumps over {number * 7} lazy dogs" for number in range(60)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer and the dataset that it made."""
    folder = tmp_path_factory.mktemp("made")
    train_tokenizer(TEXTS, folder / "tokenizer", 300)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    preprocess(
        [folder / "corpus.jsonl"],
        folder / "corpus",
        vocab_file=folder / "tokenizer" / "vocab.json",
        merge_file=folder / "tokenizer" / "merges.txt",
        append_eod=True,
        workers=1,
    )
    return folder


@pytest.fixture
def work(made, tmp_path):
    """A copy of the tokenizer and the data that a test may change."""
    shutil.copytree(made, tmp_path / "work")
    return tmp_path / "work"


def configuration(work: Path, **train: object) -> Config:
    return Config(
        model=ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2),
        data=DataConfig(
            data_path=(str(work / "corpus_text_document"),),
            seq_length=16,
            vocab_file=str(work / "tokenizer" / "vocab.json"),
            merge_file=str(work / "tokenizer" / "merges.txt"),
        ),
        train=TrainConfig(train_iters=2, eval_interval=0, **train),  # type: ignore[arg-type]
        parallel=ParallelConfig(),
    )


def start(config: Config) -> Config:
    """Everything that `holdfast train` does before the ranks start."""
    config, _ = resolve(config)
    check_data(config)
    return open_folder(config)


def open_folder(config: Config) -> Config:
    with open_run_folder(config) as opened:
        return opened


def make_step(run: Path) -> None:
    """Leaves the file that marks a run that has done a step."""
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n')


def with_tokenizer(config: Config, folder: Path) -> Config:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return replace(config, data=replace(config.data, **files))  # type: ignore[arg-type]


def test_a_run_keeps_its_tokenizer_and_absolute_paths(work, monkeypatch):
    monkeypatch.chdir(work)
    config = replace(configuration(Path()), train=TrainConfig(train_iters=2, save="run"))
    start(config)
    written = read_config("run/config.toml")
    assert written.data.data_path == (str(work / "corpus_text_document"),)
    assert written.data.vocab_file == str(work / "run" / "tokenizer" / "vocab.json")
    assert written.train.save == str(work / "run")
    assert (work / "run/tokenizer/merges.txt").read_bytes() == (work / "tokenizer/merges.txt").read_bytes()


def test_tokenizer_files_that_change_later_do_not_change_the_run(work, capsys):
    config = configuration(work, save=str(work / "run"))
    before = start(config)
    train_tokenizer(TEXTS[:5], work / "tokenizer", 280, overwrite=True)
    assert resolve(config)[0].model.vocab_size == 280, "no step depends on the copy yet"
    make_step(work / "run")
    assert start(config).data == before.data and "has changed since the run started" in capsys.readouterr().err
    shutil.rmtree(work / "tokenizer")
    assert start(config).data == before.data


def test_another_tokenizer_is_another_run(work):
    config = configuration(work, save=str(work / "run"))
    start(config)
    make_step(work / "run")
    train_tokenizer(TEXTS[:5], work / "other", 280)
    with pytest.raises(HoldfastError, match=r"--force"):
        start(with_tokenizer(config, work / "other"))
    resolved, _ = resolve(replace(with_tokenizer(config, work / "other")))
    with pytest.raises(
        HoldfastError, match=r"the tokenizer was GPT2BPETokenizer with 300 tokens \(digest \w+\) and is"
    ):
        open_folder(resolved)
    shutil.copytree(work / "tokenizer", work / "copy")
    start(with_tokenizer(config, work / "copy"))


def test_a_damaged_copy_of_the_tokenizer_is_refused(work):
    start(configuration(work, save=str(work / "run")))
    (work / "run/tokenizer/merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(HoldfastError, match="was changed"):
        read_run_config(work / "run" / "config.toml")


def test_nodes_that_start_together_carry_one_tokenizer(work):
    config, _ = resolve(configuration(work))
    (work / "run").mkdir()
    with ThreadPoolExecutor(8) as nodes:
        carried = list(nodes.map(lambda _: carry_identity(work / "run", config).data, range(16)))
    assert len(set(carried)) == 1 and len(list((work / "run" / "tokenizer").iterdir())) == 3
    assert not list((work / "run").glob(".*"))


def test_the_tokenizer_of_a_start_without_a_step_is_replaced(work):
    config = configuration(work, save=str(work / "run"))
    start(config)
    train_tokenizer(TEXTS, work / "larger", 320)
    resolved, _ = resolve(with_tokenizer(config, work / "larger"))
    open_folder(resolved)
    assert read_folder(work / "run" / "tokenizer").recipe.vocab_size == 320


def test_equal_data_by_another_path_is_the_same_run(work, tmp_path, monkeypatch):
    config = configuration(work, save=str(work / "run"))
    start(config)
    make_step(work / "run")

    def given(*data_path: str) -> Config:
        return replace(config, data=replace(config.data, data_path=data_path))

    monkeypatch.chdir(work)
    start(given("corpus_text_document"))
    (tmp_path / "link").symlink_to(work)
    start(given(str(tmp_path / "link" / "corpus_text_document")))
    for ending in ("bin", "idx"):
        (work / f"corpus_text_document.{ending}").rename(tmp_path / f"moved.{ending}")
    start(given(str(tmp_path / "moved")))
    assert read_config(work / "run" / "config.toml").data.data_path == (str(tmp_path / "moved"),)
    with pytest.raises(HoldfastError, match="holds another run: packing was 'concatenate' and is 'best-fit'"):
        start(replace(config, data=replace(given(str(tmp_path / "moved")).data, packing="best-fit")))
    written = (work / "run" / "config.toml").read_text()
    with pytest.raises(HoldfastError, match="holds another run: optimizer was 'adam' and is 'muon', whose state"):
        start(replace(given(str(tmp_path / "moved")), optimizer=replace(config.optimizer, optimizer="muon")))
    assert (work / "run" / "config.toml").read_text() == written  # it still describes the run that is there
    start(replace(given(str(tmp_path / "moved")), optimizer=replace(config.optimizer, optimizer="lamb")))
    with pytest.raises(HoldfastError, match="holds another run: data_path was .* other data"):
        preprocess([work / "corpus.jsonl"], work / "other", vocab_file=work / "tokenizer/vocab.json",
                   merge_file=work / "tokenizer/merges.txt", workers=1)  # fmt: skip
        start(given(str(work / "other_text_document")))


def test_the_fingerprint_sees_one_changed_token_at_the_end(work):
    before = fingerprint(work / "corpus_text_document")
    tokens = bytearray((work / "corpus_text_document.bin").read_bytes())
    tokens[-2] ^= 1
    (work / "corpus_text_document.bin").write_bytes(tokens)
    assert fingerprint(work / "corpus_text_document") != before


def test_a_run_from_before_runs_carried_their_tokenizer_still_starts(work, monkeypatch):
    config, _ = resolve(configuration(work, save=str(work / "run")))
    (work / "run").mkdir()
    (work / "run" / "config.toml").write_text(config_to_toml(config))
    monkeypatch.chdir(work)
    start(replace(config, data=replace(config.data, data_path=("corpus_text_document",))))
    assert (work / "run" / "tokenizer" / "recipe.json").is_file()


def test_the_tokenizer_decides_the_vocabulary_unless_the_flag_was_given(work, capsys):
    config = configuration(work, save=str(work / "run"))
    config = replace(config, model=replace(config.model, vocab_size=1000))
    resolved, _ = resolve(config)
    assert resolved.model.vocab_size == 300 and "vocab_size 1,000" in capsys.readouterr().err
    resolved, _ = resolve(config, vocab_size_given=True)
    assert resolved.model.vocab_size == 1000
    open_folder(resolved)
    continued, _ = resolve(read_run_config(work / "run" / "config.toml"))
    assert continued.model.vocab_size == 1000, "the weights have that many rows"


def test_the_command_line_distinguishes_a_flag_from_a_key_in_a_file(tmp_path):
    (tmp_path / "my.toml").write_text("[model]\nvocab_size = 1000\n")
    assert not parse([str(tmp_path / "my.toml")]).vocab_size_given
    given = parse([str(tmp_path / "my.toml"), "--vocab-size", "1000", "--force"])
    assert given.vocab_size_given and given.force and given.config.model.vocab_size == 1000


def test_data_that_another_tokenizer_made_is_refused(work, capsys):
    train_tokenizer(TEXTS, work / "larger", 320)
    config, _ = resolve(with_tokenizer(configuration(work), work / "larger"))
    with pytest.raises(HoldfastError) as caught:
        check_data(config)
    error = str(caught.value)
    for name in ("tokenizer", "larger"):
        digest = read_recipe("GPT2BPETokenizer", work / name / "vocab.json", work / name / "merges.txt").digest
        assert digest[:12] in error
    assert "300 tokens" in error and "320 tokens" in error and "--force" in error
    check_data(config, force=True)
    assert "warning" in capsys.readouterr().err
    (work / "corpus.json").unlink()
    check_data(config)


def test_a_moved_run_resumes_generates_and_converts_from_another_directory(work, tmp_path):
    def train(*arguments: str, cwd: Path) -> None:
        command = [sys.executable, "-m", "holdfast.cli", "train", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd)
        assert done.returncode == 0, done.stderr

    shapes = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --eval-interval 0 --no-tensorboard"
    )
    files = "--vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt --data-path corpus_text_document"
    train(*shapes.split(), *files.split(), "--train-iters", "2", "--save", "run", cwd=work)
    train_tokenizer(TEXTS[:5], work / "tokenizer", 280, overwrite=True)
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (work / "run").rename(moved)
    train("elsewhere/renamed/config.toml", "--train-iters", "4", cwd=tmp_path)
    assert not (work / "run").exists()
    events = [json.loads(line) for line in (moved / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [2]
    assert (moved / "checkpoints" / "latest").read_text().strip() == "step-00000004"
    from holdfast.generation.loading import load_model

    assert load_model(moved).tokenizer.vocab_size == 300
    folder = convert(moved / "checkpoints" / "step-00000004", tmp_path / "hf")
    assert (folder / "vocab.json").read_bytes() == (moved / "tokenizer" / "vocab.json").read_bytes()
    assert not inspect_path(moved)[1].problems and not inspect_path(moved / "checkpoints" / "step-00000004")[1].problems

"""What a run does besides its losses: memory per rank, precision, overfitting, start-up by torchrun, failures of a rank."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from holdfast.config import OptimizerConfig, ParallelConfig, read_config
from holdfast.data.preprocess.run import preprocess
from holdfast.parallel.layout import layout_of, padded_vocab_size
from holdfast.parallel.mesh import build_grid
from holdfast.parallel.parallelize import parallelize
from holdfast.system.journal import read_journal
from holdfast.tokenizers.training import train_tokenizer
from holdfast.train.checks.preflight import resolve
from holdfast.train.worker import rehearse, run_worker
from tests.corpus import VOCABULARY, write_dataset
from tests.distributed.test_layouts import assert_same_curve, tiny, train_on
from tests.gloo import spawn_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def single_process(prefix, tmp_path_factory):
    return train_on(1, tiny(prefix, tmp_path_factory.mktemp("alone") / "run"), ParallelConfig())


def hold_345m() -> tuple[int, int, int]:
    """Bytes of parameters on this rank, of the whole model, and how much the process grew while it was built."""
    from holdfast.models.gpt import GPT

    config = read_config(Path(__file__).parents[2] / "configs" / "gpt2_345m.toml")
    torch.distributed.init_process_group("gloo")
    layout = layout_of(ParallelConfig(tensor_model_parallel_size=2), 2)
    grid = build_grid(layout, torch.device("cpu"))
    assert config.model.vocab_size is not None
    padded = padded_vocab_size(config.model.vocab_size, config.model, 2)
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=config.model.vocab_size, padded_vocab_size=padded, max_positions=1024)
    whole = sum(p.numel() for p in model.parameters()) * 4
    before = resident()
    parallelize(
        model,
        grid,
        sequence_parallel=True,
        recompute="none",
        compiled=False,
        fp8=False,
        dtype=torch.float32,
    )
    for parameter in model.parameters():
        parameter.data.fill_(1.0)  # touches every page
    grown = resident() - before
    here = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters()) * 4
    torch.distributed.destroy_process_group()
    return here, whole, grown


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_tensor_parallel_rank_of_the_345m_model_never_holds_more_than_its_share():
    for here, whole, grown in spawn_ranks(2, hold_345m):
        assert whole > 1_400_000_000
        assert here < 0.51 * whole
        assert grown < 0.6 * whole


@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_recomputed_activations_change_nothing(granularity, prefix, single_process, tmp_path):
    config = tiny(prefix, tmp_path / "run")
    config = replace(config, train=replace(config.train, recompute_granularity=granularity))
    assert_same_curve(train_on(1, config, ParallelConfig()), single_process, tolerance=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_the_fp32_curve(precision, prefix, single_process, tmp_path):
    config = tiny(prefix, tmp_path / "run")
    train = replace(config.train, bf16=precision == "bf16", fp16=precision == "fp16")
    config = replace(config, train=train, optimizer=replace(config.optimizer, initial_loss_scale=1024.0))
    found = train_on(2, config, ParallelConfig())
    for ours, exact in zip(found, single_process, strict=True):
        assert ours["loss"] == pytest.approx(exact["loss"], rel=2e-2), exact["iteration"]
    assert ("loss_scale" in found[-1]) == (precision == "fp16")


def test_a_rehearsal_reads_the_samples_of_the_run_and_keeps_nothing(tmp_path):
    config = tiny(write_dataset(tmp_path / "corpus"), tmp_path / "run")
    config = replace(
        config,
        train=replace(config.train, train_iters=2, eval_interval=0),
        optimizer=replace(config.optimizer, lr_decay_style="cosine", lr_decay_iters=9),
    )
    spawn_ranks(1, run_worker, resolve(replace(config, train=replace(config.train, save=None)))[0])
    before = sorted(tmp_path.rglob("*"))
    spawn_ranks(1, rehearse, resolve(config)[0])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_ends_although_its_samples_are_not_a_multiple_of_the_batch(tmp_path):
    """A blend with weights has no more samples than it was asked for."""
    first, second = (str(write_dataset(tmp_path / name, documents=40)) for name in ("a", "b"))
    config = tiny(tmp_path / "a", tmp_path / "run")
    config = replace(
        config,
        data=replace(config.data, data_path=("0.5", first, "0.5", second)),
        train=replace(config.train, train_iters=None, train_samples=20, eval_interval=0),
        optimizer=replace(config.optimizer, lr_warmup_iters=1),
    )
    records = train_on(1, config, ParallelConfig())
    assert [record["consumed_samples"] for record in records] == [8, 16, 24]


def test_a_run_that_needs_more_samples_than_there_are_does_not_start(tmp_path):
    first, second = (str(write_dataset(tmp_path / name, documents=40)) for name in ("a", "b"))
    config = tiny(tmp_path / "a", tmp_path / "run")
    config = replace(config, data=replace(config.data, data_path=(first, second)))
    with pytest.raises(
        AssertionError, match="the run needs 8,000 training samples, but the data has [0-9]+: .* read once"
    ):
        train_on(1, replace(config, train=replace(config.train, train_iters=1000)), ParallelConfig())
    with pytest.raises(AssertionError, match="the run needs 800 validation samples"):
        train_on(
            1,
            replace(config, train=replace(config.train, eval_interval=1, eval_iters=50, train_iters=2)),
            ParallelConfig(),
        )
    assert not list(read_journal(tmp_path / "run" / "metrics.jsonl"))


@pytest.mark.slow
def test_a_hundred_sentences_are_learnt_by_heart(tmp_path):
    """From text, through tokenizer and dataset: a word is a token, a sentence with its end of document is a sample.

    Which sentence comes next cannot be known, so the loss leaves that out.
    """
    random = np.random.default_rng(3)
    words = sorted({"".join(random.choice(list("abcdefghijklmnop"), 3)) for _ in range(110)})[:100]
    sentences = [" ".join(["", words[number], *random.choice(words, 14)]) for number in range(100)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"".join(orjson.dumps({"text": sentence}) + b"\n" for sentence in sentences))
    vocab, merges = train_tokenizer(sentences, tmp_path / "tokenizer", vocab_size=800)
    preprocess(corpus, tmp_path / "sentences", vocab_file=vocab, merge_file=merges, append_eod=True)
    config = tiny(tmp_path / "sentences_text_document", tmp_path / "run")
    config = replace(
        config,
        model=replace(config.model, num_layers=2, hidden_size=128, vocab_size=None),
        data=replace(
            config.data,
            split="100,0,0",
            seq_length=32,
            vocab_file=str(vocab),
            merge_file=str(merges),
            eod_mask_loss=True,
        ),
        train=replace(config.train, train_iters=150, micro_batch_size=64, global_batch_size=64, eval_interval=0),
        optimizer=OptimizerConfig(lr=3e-3, min_lr=3e-4, lr_warmup_iters=20, weight_decay=0.0, adam_beta2=0.99),
    )
    assert min(record["loss"] for record in train_on(1, config, ParallelConfig())) < 0.1


def flags(prefix: Path, save: Path) -> list[str]:
    words = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --split 90,10,0 --micro-batch-size 2 "
        f"--global-batch-size 4 --train-iters 4 --eval-interval 0 --no-tensorboard --vocab-size {VOCABULARY}"
    )
    return [*words.split(), "--data-path", str(prefix), "--save", str(save)]


@pytest.mark.slow
def test_plain_torchrun_starts_the_same_run(prefix, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "holdfast.train"]
    subprocess.run([*torchrun, *flags(prefix, tmp_path / "torchrun")], check=True, capture_output=True, timeout=300)
    ours = [sys.executable, "-m", "holdfast.cli", "train", "--nproc-per-node", "2"]
    usual = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*ours, *flags(prefix, tmp_path / "ours"), "--json"], check=True, capture_output=True, timeout=300, env=usual
    )
    curves = [
        [record["loss"] for record in read_journal(tmp_path / name / "metrics.jsonl")] for name in ("torchrun", "ours")
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 4
    assert orjson.loads(done.stdout) == {
        "run": str(tmp_path / "ours"),
        "iteration": 4,
        "loss": curves[1][-1],
        "validation_loss": None,
        "finished": True,
        "checkpoint": str(tmp_path / "ours" / "checkpoints" / "step-00000004"),
    }


def test_a_failing_rank_is_named_once_with_its_cause(prefix, tmp_path):
    """Rank 1 raises in its first step, every time; the others' consequences are not shown as causes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import holdfast.train.loop as loop\n"
        "    def broken(self): raise RuntimeError('the sample is cursed')\n"
        "    loop.TrainingRun.one_step = broken\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "holdfast.cli", "train", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--no-fork-server"]  # Python imports sitecustomize once per process, and not in a forked rank
    done = subprocess.run(
        [*command, *flags(prefix, tmp_path / "run")], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    logs = tmp_path / "run" / "logs"
    cause = "rank 1: the sample is cursed (2 times)"
    assert last == f"holdfast: error: gave up after 1 restart: {cause}; the ranks' output is in {logs}", done.stderr
    assert done.stderr.count(f"the end of {logs}/rank-1.log:") == 1 and "(1 restart left)" in done.stderr
    assert "gloo" not in done.stderr and (logs / "rank-1.log").read_text().count("=== rank 1, ") == 2

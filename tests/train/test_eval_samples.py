"""`--eval-samples`: the texts are those of the weights at that step, in every layout, and training does not notice them."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from holdfast import generate
from holdfast.data.preprocess.run import preprocess
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.journal import read_journal
from holdfast.tokenizers.training import train_tokenizer
from holdfast.train.checks.preflight import resolve
from holdfast.train.eval_samples import NEW_TOKENS
from holdfast.train.worker import run_worker
from tests.distributed.test_kill import assert_same_state, final_state
from tests.distributed.test_layouts import LAYOUTS, tiny
from tests.gloo import spawn_ranks
from tests.grids import mostly_slow

SENTENCES = [f"the {noun} {verb} a {noun}" for noun in ("cat", "dog", "fox", "owl") for verb in ("sees", "likes")] * 40


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run of 8 steps with evaluations after 4 and 8, dropout and checkpoints."""
    folder = tmp_path_factory.mktemp("text")
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b"".join(orjson.dumps({"text": sentence}) + b"\n" for sentence in SENTENCES))
    vocab, merges = train_tokenizer(SENTENCES, folder / "tokenizer", vocab_size=300)
    preprocess(corpus, folder / "text", vocab_file=vocab, merge_file=merges, append_eod=True)
    found = tiny(folder / "text_text_document", folder / "unused", hidden_dropout=0.1)
    return replace(
        found,
        model=replace(found.model, vocab_size=None, max_position_embeddings=128),
        data=replace(found.data, vocab_file=str(vocab), merge_file=str(merges)),
        train=replace(found.train, train_iters=8, eval_interval=4, eval_iters=1, save_interval=4),
    )


def train_and_draw(config):
    """The state of the random generator after the run."""
    run_worker(config)
    return torch.get_rng_state().tolist()


def train(config, layout, save: Path, **changes):
    world, parallel = LAYOUTS[layout]
    config = replace(config, train=replace(config.train, save=str(save), **changes), parallel=parallel)
    config, _ = resolve(config, world)
    return spawn_ranks(world, train_and_draw, config)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    mostly_slow(["fsdp2", "pp2", "pp2-interleaved", "tp2-fsdp2"], ["pp2"]),
)
def test_samples_are_texts_of_the_weights_and_change_nothing(layout, config, tmp_path):
    plain, sampled, prompts = tmp_path / "plain", tmp_path / "sampled", tmp_path / "prompts.txt"
    prompts.write_text("the cat\n\nthe fox likes\n")
    generators = train(config, layout, plain)
    assert not (plain / "samples.jsonl").exists()
    assert train(config, layout, sampled, eval_samples=3, eval_prompts=str(prompts)) == generators
    assert_same_state(final_state(sampled), final_state(plain))
    records = list(read_journal(sampled / "samples.jsonl"))
    expected = ["the cat", "the fox likes", "the cat"]
    assert [(record["step"], record["prompt"]) for record in records] == [(s, p) for s in (4, 8) for p in expected]
    for step in (4, 8):
        seed, texts = config.train.seed, [record["text"] for record in records if record["step"] == step]
        checkpoint = sampled / "checkpoints" / f"step-{step:08d}"
        assert texts == [one.text for one in generate(checkpoint, expected, max_new_tokens=NEW_TOKENS, seed=seed)]
    assert all(record["text"] == record["prompt"] + record["completion"] for record in records)


@pytest.mark.slow
@pytest.mark.distributed
def test_prompts_are_beginnings_of_validation_samples(config, tmp_path):
    config = replace(config, train=replace(config.train, save=str(tmp_path / "run"), eval_samples=2))
    config, _ = resolve(replace(config, train=replace(config.train, train_iters=4)), 1)
    spawn_ranks(1, run_worker, config)
    records = list(read_journal(tmp_path / "run" / "samples.jsonl"))
    assert len(records) == 2 and all(len(record["prompt"].split()) > 2 for record in records)
    assert set(" ".join(record["prompt"] for record in records).split()) & {"sees", "likes"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_samples": 0, "eval_prompts": "x"}, "--eval-prompts needs --eval-samples"),
        ({"save": None}, "give --save DIR"),
        ({"eval_interval": 0}, "give --eval-interval"),
        ({"eval_prompts": "missing.txt"}, "missing.txt cannot be read: No such file"),
        ({"eval_prompts": "empty.txt"}, "has no prompts; write one per line"),
        ({"eval_prompts": "long.txt"}, "prompt 2 has .* tokens, but the model has 128 positions"),
        ({"eval_prompts": "latin1.txt"}, "is not UTF-8 text"),
    ],
)
def test_what_cannot_work_is_refused_before_a_rank_starts(changes, message, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("long.txt").write_text("the cat\n" + "the cat sees a dog " * 40)
    Path("latin1.txt").write_bytes("Stra\u00dfe\n".encode("latin-1"))
    config = replace(config, train=replace(config.train, **{"save": "run", "eval_samples": 2, **changes}))
    with pytest.raises(HoldfastError, match=message):
        resolve(config, 1)


def test_samples_need_a_tokenizer_and_a_decoder(config):
    train = replace(config.train, eval_samples=2)
    without = replace(config.data, vocab_file=None, merge_file=None)
    with pytest.raises(HoldfastError, match="needs the run's tokenizer"):
        resolve(replace(config, data=without, train=train), 1)
    with pytest.raises(UsageError, match="a BERT model does not generate text"):
        resolve(replace(config, model=replace(config.model, model_type="bert"), train=train), 1)

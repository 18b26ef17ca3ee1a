"""A BERT run, trained here, becomes a Hugging Face folder that computes the same function; one phase starts from another."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer

from holdfast import convert
from holdfast.checkpoint import State, load_newest
from holdfast.config import Config, ParallelConfig
from holdfast.models.bert import BERT
from holdfast.tokenizers import build_tokenizer
from holdfast.train.checks.preflight import resolve
from tests.corpus import write_sentences
from tests.distributed.test_bert_layouts import tiny_bert
from tests.distributed.test_layouts import train_on

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("sentences"), documents=10)


def short(corpus: tuple[Path, Path], save: Path, **model: object) -> Config:
    config = tiny_bert(corpus, save, max_position_embeddings=48, **model)
    return replace(config, train=replace(config.train, train_iters=3, eval_interval=0))


def load(config: Config, run: Path) -> BERT:
    config, _ = resolve(config, 1)
    vocabulary = config.model.vocab_size
    model = BERT(config.model, vocab_size=vocabulary, padded_vocab_size=256, max_positions=48, dtype=torch.float64)
    rows = dict.fromkeys(("embedding.word_embeddings.weight", "output_layer.bias"), vocabulary)
    assert load_newest(run, State(model, padded_rows=rows), optimizer=False, weights_only=True)
    return model.double().eval()


@pytest.mark.parametrize("variant", ["megatron", "original"])
def test_a_trained_run_converts_and_transformers_computes_the_same(corpus, tmp_path, variant):
    config = short(corpus, tmp_path / "run", bert_variant=variant)
    train_on(1, config, ParallelConfig())
    ours = load(config, tmp_path / "run")
    folder = convert(tmp_path / "run", tmp_path / "hf", to="hf")
    theirs = AutoModelForPreTraining.from_pretrained(folder, dtype=torch.float64).eval()
    assert type(theirs).__name__ == ("MegatronBert" if variant == "megatron" else "Bert") + "ForPreTraining"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (
        ["Return the number of items.", "Raise an error."],
        ["It may be zero.", "If the argument is not a file, wait."],
    )
    batch = tokenizer(*text, padding=True, return_tensors="pt")
    plain = build_tokenizer("BertWordPieceLowerCase", str(corpus[0]), None, None)
    first = batch["input_ids"][0, 1 : 1 + len(plain.encode(text[0][0]))]
    assert first.tolist() == list(plain.encode(text[0][0]))
    padding = batch["attention_mask"].bool()
    assert not padding.all()
    with torch.no_grad():
        out = theirs(**batch)
        logits, scores = ours.logits(ours.hidden(batch["input_ids"], padding, batch["token_type_ids"]))
    assert (logits[padding] - out.prediction_logits[padding]).abs().max() < 1e-12
    assert (scores - out.seq_relationship_logits).abs().max() < 1e-12


def test_the_second_phase_starts_with_the_weights_of_the_first_and_a_fresh_schedule(corpus, tmp_path):
    first, second = short(corpus, tmp_path / "one"), short(corpus, tmp_path / "two")
    train_on(1, first, ParallelConfig())
    second = replace(
        second,
        data=replace(second.data, seq_length=48),
        train=replace(second.train, load=str(tmp_path / "one"), finetune=True, train_iters=1),
        optimizer=replace(second.optimizer, lr_warmup_fraction=0.5),
    )
    (record,) = train_on(1, second, ParallelConfig())
    assert record["iteration"] == 1 and record["lr"] == 0.0 and record["consumed_samples"] == 8
    before, after = (
        load(config, Path(config.train.save or "")).state_dict() for config in (first, second)
    )  # with a learning rate of 0 the step changes nothing
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_the_fine_tuning_example_runs_on_the_converted_folder(corpus, tmp_path):
    train_on(1, short(corpus, tmp_path / "run", bert_variant="original"), ParallelConfig())
    folder = convert(tmp_path / "run", tmp_path / "hf", to="hf")
    data = tmp_path / "reviews.tsv"
    data.write_text(
        "".join(f"{n % 2}\tthis {'returns' if n % 2 else 'raises'} what file {n} holds\n" for n in range(40))
    )
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune_bert.py"), str(folder), str(data), str(tmp_path / "classifier")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout and (tmp_path / "classifier" / "model.safetensors").exists()

"""A tiny BERT learns from real text: it predicts masked tokens better than anyone who knows only how frequent they are."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.config import ParallelConfig
from holdfast.data.indexed import IndexedDataset
from tests.corpus import write_sentences
from tests.distributed.test_bert_layouts import tiny_bert
from tests.distributed.test_layouts import train_on

STEPS, BATCH = 400, 64


def unigram_entropy(prefix) -> float:
    counts = np.bincount(np.concatenate(list(IndexedDataset(prefix))))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_masked_token_loss_falls_below_the_unigram_entropy_of_the_corpus(tmp_path):
    corpus = write_sentences(tmp_path / "data", vocab_size=80)
    config = tiny_bert(corpus, tmp_path / "run")
    config = replace(
        config,
        model=replace(config.model, num_layers=1, hidden_size=128),
        data=replace(config.data, seq_length=16, split="1,0,0"),
        train=replace(
            config.train, train_iters=STEPS, micro_batch_size=BATCH, global_batch_size=BATCH, eval_interval=0
        ),
        optimizer=replace(
            config.optimizer, optimizer="adam", lr=6e-4, lr_decay_style="constant", lr_warmup_fraction=0.1, adam_beta2=0.98
        ),
        snapshot=replace(config.snapshot, snapshot_interval=0),
    )  # fmt: skip
    losses = [record["mlm_loss"] for record in train_on(1, config, ParallelConfig())]
    entropy = unigram_entropy(corpus[1])
    assert losses[0] > entropy
    assert np.mean(losses[-50:]) < entropy - 0.4  # 0.6 to 0.8 in fact, by the order of the vocabulary

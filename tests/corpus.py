"""Small datasets that tests train on, written with the real writer."""

from pathlib import Path

import numpy as np

from holdfast.data.indexed import IndexedDatasetBuilder

VOCABULARY = 97


def write_dataset(prefix: Path, documents: int = 200, seed: int = 0, vocab_size: int = VOCABULARY) -> Path:
    """Documents with something to learn: each token is mostly decided by the one before it."""
    random = np.random.default_rng(seed)
    successor = random.permutation(vocab_size)
    builder = IndexedDatasetBuilder(prefix, np.uint16)
    for _ in range(documents):
        tokens = [int(random.integers(vocab_size))]
        for _ in range(int(random.integers(20, 80))):
            chance = random.random()
            tokens.append(int(successor[tokens[-1]]) if chance < 0.8 else int(random.integers(vocab_size)))
        builder.add_document(tokens)
    builder.finalize()
    return prefix

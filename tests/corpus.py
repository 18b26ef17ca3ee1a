"""Small datasets that tests train on, written with the real writer."""

import ast
import os
import re
from pathlib import Path

import numpy as np

from holdfast.data.indexed import IndexedDatasetBuilder
from holdfast.tokenizers import build_tokenizer
from holdfast.tokenizers.training import train_tokenizer

VOCABULARY = 97
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


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


def write_sentences(folder: Path, vocab_size: int = 200, documents: int = 30) -> tuple[Path, Path]:
    """Real English, one document per standard library module that explains itself: (vocab.txt, prefix of the sentences)."""
    texts: list[list[str]] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(texts) == documents:
            break
        nodes = ast.walk(ast.parse(path.read_bytes()))
        found = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
        sentences = [" ".join(s.split()) for text in found if text for s in re.split(r"(?<=[.:])\s+", text)]
        if len(sentences) > 20:
            texts.append(sentences[:200])
    (vocab,) = train_tokenizer([s for text in texts for s in text], folder, vocab_size, "wordpiece")
    tokenizer = build_tokenizer("BertWordPieceLowerCase", str(vocab), None, None)
    builder = IndexedDatasetBuilder(folder / "text_sentence", np.uint16)
    for sentences in texts:
        encoded = [tokens for tokens in map(tokenizer.encode, sentences) if len(tokens)]
        builder.add_document(np.concatenate(encoded), [len(tokens) for tokens in encoded])
    builder.finalize()
    return vocab, folder / "text_sentence"

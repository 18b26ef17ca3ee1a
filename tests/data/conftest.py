"""Tokenizers for the tests of the data stage: GPT-2's own where the machine has them, and small ones trained here."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.tokenizers import Tokenizer, build_tokenizer
from holdfast.tokenizers.training import train_tokenizer
from tests.data.corpora import NASTY, gpt2_folder


@dataclass(frozen=True)
class TokenizerFiles:
    tokenizer_type: str
    vocab_file: Path
    merge_file: Path | None = None

    def build(self, engine: str = "reference") -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file, engine=engine)  # type: ignore[arg-type]

    def arguments(self) -> dict[str, object]:
        return {"tokenizer_type": self.tokenizer_type, "vocab_file": self.vocab_file, "merge_file": self.merge_file}

    def flags(self) -> list[str]:
        flags = ["--tokenizer-type", self.tokenizer_type, "--vocab-file", str(self.vocab_file)]
        return flags + (["--merge-file", str(self.merge_file)] if self.merge_file else [])


def training_texts() -> list[str]:
    """This repository's own Python files and the nasty texts."""
    root = Path(__file__).resolve().parents[2]
    texts = [path.read_text() for path in sorted((root / "src").rglob("*.py"))]
    return texts + [text for text in NASTY if isinstance(text, str) and len(text) < 1000]


@pytest.fixture(scope="session")
def small_bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer(training_texts(), folder, 1000, "bpe")
    return TokenizerFiles("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt")


@pytest.fixture(scope="session")
def gpt2(small_bpe: TokenizerFiles) -> TokenizerFiles:
    """The real GPT-2, or the trained one on a machine without it."""
    folder = gpt2_folder()
    return TokenizerFiles("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt") if folder else small_bpe


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    folder = tmp_path_factory.mktemp("wordpiece")
    train_tokenizer(training_texts(), folder, 2000, "wordpiece")
    return TokenizerFiles("BertWordPieceLowerCase", folder / "vocab.txt")


@pytest.fixture(scope="session")
def bert_cased(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    folder = tmp_path_factory.mktemp("wordpiece-cased")
    train_tokenizer(training_texts(), folder, 2000, "wordpiece-cased")
    return TokenizerFiles("BertWordPieceCase", folder / "vocab.txt")

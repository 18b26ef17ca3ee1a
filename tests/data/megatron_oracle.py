"""What megatron-core makes of a dataset: the oracle of the sample tests, and the writer of their `.bin/.idx` pairs."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np


def write_dataset(prefix: Path, lengths: list[int], seed: int = 0, vocab_size: int = 1000, eod: int = 0) -> str:
    """Documents of the given lengths, one sequence each, with random tokens and `eod` at the end."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, vocab_size, sum(lengths)).astype(np.uint16)
    if lengths:
        tokens[np.cumsum(lengths) - 1] = eod
    return write_sequences(prefix, tokens, lengths, list(range(len(lengths) + 1)))


def write_sequences(prefix: Path, tokens: np.ndarray, lengths: list[int], document_indices: list[int]) -> str:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    sizes = np.array(lengths, dtype=np.int32)
    pointers = np.zeros(len(sizes), dtype=np.int64)
    pointers[1:] = np.cumsum(sizes[:-1], dtype=np.int64) * tokens.itemsize
    code = {"uint16": 8, "int32": 4}[tokens.dtype.name]
    header = b"MMIDIDX\x00\x00" + np.int64(1).tobytes() + bytes([code])
    header += np.array([len(sizes), len(document_indices)], dtype=np.int64).tobytes()
    documents = np.array(document_indices, dtype=np.int64)
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + documents.tobytes())
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    return str(prefix)


class OracleTokenizer:
    """The few facts about a tokenizer that megatron-core's datasets ask for."""

    def __init__(self, vocab_size: int = 1000, eod: int = 0) -> None:
        self.vocab_size, self.eod, self.pad = vocab_size, eod, -1
        self.unique_identifiers = {"vocab_size": vocab_size}


def megatron_gpt_splits(
    data_path: list[str],
    split: str,
    seq_length: int,
    seed: int,
    samples: tuple[int | None, ...],
    reset: bool = False,
) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=get_blend_from_list(data_path),
        split=split,
        tokenizer=OracleTokenizer(),
        reset_position_ids=reset,
        reset_attention_mask=reset,
        eod_mask_loss=reset,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BlendedMegatronDatasetBuilder(GPTDataset, list(samples), lambda: True, config).build()


class OracleWordPieces(OracleTokenizer):
    """A word-piece vocabulary of numbers: ids from 5 on are words and, every third of them, continuations."""

    def __init__(self, vocab_size: int = 1000) -> None:
        super().__init__(vocab_size, eod=3)
        self.pad, self.cls, self.sep, self.mask = 0, 2, 3, 4
        self.inv_vocab = {number: f"##{number}" if number % 3 == 0 else str(number) for number in range(vocab_size)}


def megatron_bert_samples(prefix: str, num_samples: int | None, seq_length: int, seed: int, folder: Path) -> Any:
    """megatron-core's BERT dataset over all documents, without short sequences. It asks torch.distributed for its rank."""
    import torch.distributed as dist
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1",
        tokenizer=OracleWordPieces(),
        path_to_cache=str(folder / "oracle"),
        masking_probability=0.15,
        short_sequence_probability=0.0,
        masking_max_ngram=1,
        masking_do_full_word=False,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
    data = IndexedDataset(prefix)
    documents = np.arange(len(data.document_indices) - 1, dtype=np.int32)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    try:
        return BERTMaskedWordPieceDataset(data, prefix, documents, num_samples, Split.train, config)
    finally:
        dist.destroy_process_group()

"""Everything that can be refused before a rank starts: the configuration is completed, checked and described here.

`resolve` fills in what the user left to be derived (vocabulary size, batch size), so that the run's config.toml says it all.
"""

from dataclasses import replace
from pathlib import Path

from holdfast.assets import fetching
from holdfast.config import Config, config_to_toml, read_config
from holdfast.errors import HoldfastError
from holdfast.parallel.layout import Layout, check_layout, layout_of
from holdfast.publish import publish_text
from holdfast.tokenizers import Tokenizer, build_tokenizer
from holdfast.train.schedule import batches_of, schedule_of

# Keys that may differ between two starts of one run: how long, how cut, how reported; not what is computed.
IDENTITY = {
    "model": None,  # all of it
    "data": ("data_path", "split", "seq_length", "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model"),
    "train": ("seed",),
}


def tokenizer_of(config: Config) -> Tokenizer | None:
    """The run's tokenizer, its files fetched where they are names or URLs; None if the configuration names none."""
    data = config.data
    if not (data.vocab_file or data.merge_file or data.tokenizer_model):
        return None
    vocab, merges, model = (
        None if name is None else fetching.resolve(name, role)
        for name, role in ((data.vocab_file, "vocab"), (data.merge_file, "merges"), (data.tokenizer_model, None))
    )
    return build_tokenizer(data.tokenizer_type, vocab, merges, model)


def resolve(config: Config, world: int | None = None) -> tuple[Config, Layout]:
    """The complete configuration and its layout, or a HoldfastError that says what cannot work."""
    layout = layout_of(config.parallel, world)
    tokenizer = tokenizer_of(config)
    vocab_size = config.model.vocab_size
    if tokenizer is not None:
        if vocab_size is not None and vocab_size < tokenizer.vocab_size:
            raise HoldfastError(
                f"vocab_size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}; leave it unset"
            )
        vocab_size = vocab_size or tokenizer.vocab_size
    if vocab_size is None:
        raise HoldfastError("give vocab_size, or the tokenizer (vocab_file and merge_file, or tokenizer_model)")
    positions = config.model.max_position_embeddings or config.data.seq_length
    batch = config.train.global_batch_size or config.train.micro_batch_size * layout.data
    config = replace(
        config,
        model=replace(config.model, vocab_size=vocab_size, max_position_embeddings=positions),
        train=replace(config.train, global_batch_size=batch),
    )
    check_layout(config, layout)
    if config.model.model_type == "bert":
        check_bert(config)
    schedule_of(config, batches_of(config, layout.data))
    return config, layout


def check_bert(config: Config) -> None:
    """Refuses what has a meaning for GPT only."""
    model, data = config.model, config.data
    problems = []
    if model.position_embedding_type != "learned_absolute":
        problems.append("BERT has learned positions: leave position_embedding_type unset")
    for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(data, key):
            problems.append(f"{key} is for GPT, whose samples cross documents; BERT's do not")
    if config.parallel.context_parallel_size > 1:
        problems.append("context_parallel_size is for GPT: leave it at 1")
    if not 0 < data.masked_lm_prob <= 1:
        problems.append(f"masked_lm_prob {data.masked_lm_prob} is not a share between 0 and 1")
    if problems:
        raise HoldfastError("; ".join(problems))


def check_data(config: Config) -> None:
    """The dataset is there, and its token ids fit the vocabulary."""
    from holdfast.data.blend import parse_data_path
    from holdfast.data.gpt_samples import check_token_range
    from holdfast.data.indexed import IndexedDataset

    assert config.model.vocab_size is not None
    if config.model.model_type == "bert" and tokenizer_of(config) is None:
        raise HoldfastError("BERT masks tokens while it trains and needs the tokenizer: give vocab_file")
    for prefix in parse_data_path(config.data.data_path).prefixes:
        check_token_range(IndexedDataset(prefix), config.model.vocab_size)


def open_run_folder(config: Config) -> None:
    """Writes config.toml, unless the folder belongs to another run: then nothing is touched."""
    if config.train.save is None:
        return
    folder = Path(config.train.save)
    existing = folder / "config.toml"
    if existing.exists():
        differing = _differences(read_config(existing), config)
        if differing:
            raise HoldfastError(
                f"{folder} holds another run: {'; '.join(differing)}. Choose another --save folder, or --load {folder} "
                "--finetune to start from its weights"
            )
    elif folder.exists() and any(folder.iterdir()) and not _only_traces(folder):
        raise HoldfastError(f"{folder} is not empty and not a run (no config.toml); choose another --save folder")
    publish_text(existing, config_to_toml(config))


def _only_traces(folder: Path) -> bool:
    """Logs and job files that a launcher put there first."""
    return all(entry.suffix in (".log", ".out", ".sbatch", ".json", ".yaml", ".tmp") for entry in folder.iterdir())


def _differences(old: Config, new: Config) -> list[str]:
    found = []
    for section, keys in IDENTITY.items():
        before, after = getattr(old, section), getattr(new, section)
        for key in keys or vars(before):
            if getattr(before, key) != getattr(after, key):
                found.append(f"{key} was {getattr(before, key)!r} and is {getattr(after, key)!r}")
    return found

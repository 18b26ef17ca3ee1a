"""Completes and checks the configuration and the data before any rank starts.

`resolve` derives the values that the user left unset (vocabulary size, batch size), so that the run's config.toml is complete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.config import Config, DataConfig, read_config
from holdfast.parallel.layout import ParallelLayout, check_layout, layout_of
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log
from holdfast.tokenizers import Tokenizer, build_tokenizer, read_recipe
from holdfast.tokenizers.folder import FILE_KEYS, describe, recipe_of
from holdfast.train.checks.bounds import check_bounds
from holdfast.train.checks.eval_prompts import check_eval_samples
from holdfast.train.learning_rates import parse_factors
from holdfast.train.profiling import profiled_steps
from holdfast.train.run_folder.identity import adopt_tokenizer, differences, tokenizer_names
from holdfast.train.schedule import batches_of, schedule_of
from holdfast.train.trackers.process import check_trackers

DOCUMENT_KEYS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def tokenizer_of(config: Config) -> Tokenizer | None:
    """The run's tokenizer; None if the configuration names none. Fetches files that are given as catalog names or URLs."""
    data = config.data
    if not (data.vocab_file or data.merge_file or data.tokenizer_model):
        return None
    return build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file, data.tokenizer_model)


def resolve(config: Config, world: int | None = None, vocab_size_given: bool = False) -> tuple[Config, ParallelLayout]:
    """The complete configuration and its layout; a HoldfastError lists what cannot work.

    `vocab_size_given`: the user gave vocab_size on the command line, and not only in a file made for another tokenizer.
    """
    check_bounds(config)
    check_trackers(config.log, config.train.save)
    profiled_steps(config.log.profile)
    parse_factors(config.optimizer.lr_mult)
    layout = layout_of(config.parallel, world)
    config = adopt_tokenizer(config)
    tokenizer = tokenizer_of(config)
    check_eval_samples(config, tokenizer)
    if config.model.model_type == "gpt":
        check_document_ends(config.data, tokenizer)
    vocab_size = config.model.vocab_size
    if tokenizer is not None:
        vocab_size = choose_vocab_size(config, tokenizer.vocab_size, vocab_size_given)
    if vocab_size is None:
        raise HoldfastError(
            "give vocab_size, or the tokenizer (vocab_file and merge_file, or tokenizer_model); to start from your own text: "
            "holdfast init my-model --input corpus.jsonl"
        )
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


def check_document_ends(data: DataConfig, tokenizer: Tokenizer | None) -> None:
    """Refuses keys that need the end-of-document token, if the run does not know it. Packed samples know where documents end."""
    keys = ("eod_mask_loss",) if data.packing == "best-fit" else DOCUMENT_KEYS
    needing = [key for key in keys if getattr(data, key)]
    if needing and (tokenizer is None or tokenizer.eod is None):
        files = "give the tokenizer (vocab_file and merge_file, or tokenizer_model)"
        cause = files if tokenizer is None else "the tokenizer has none"
        raise HoldfastError(f"{' and '.join(needing)} need the end-of-document token: {cause}")


def choose_vocab_size(config: Config, tokens: int, given: bool) -> int:
    """The tokenizer's size, unless the user gives a larger one or the run already has one."""
    size = config.model.vocab_size
    if size is None or size == tokens:
        return tokens
    if size < tokens:
        raise HoldfastError(f"vocab_size {size} is smaller than the tokenizer's {tokens}; leave it unset")
    run = Path(config.train.save, "config.toml") if config.train.save else None
    if given or (run is not None and run.is_file() and read_config(run).model.vocab_size == size):
        return size
    log(
        f"vocab_size {size:,} of the configuration is ignored: the tokenizer has {tokens:,} tokens "
        f"(--vocab-size {size} keeps it)"
    )
    return tokens


def check_bert(config: Config) -> None:
    """Refuses keys that apply to GPT only."""
    model, data = config.model, config.data
    problems = []
    if model.position_embedding_type != "learned_absolute":
        problems.append("BERT has learned positions: leave position_embedding_type unset")
    for key in DOCUMENT_KEYS:
        if getattr(data, key):
            problems.append(f"{key} applies to GPT, whose samples cross documents; leave it unset for BERT")
    if data.packing != "concatenate":
        problems.append("packing applies to GPT; BERT samples hold whole sentences: leave it unset")
    if config.optimizer.z_loss:
        problems.append("z_loss applies to GPT; leave it unset for BERT")
    if data.seq_length < 5:
        problems.append(f"seq_length {data.seq_length} has no room for two segments between three special tokens")
    if not 0 < data.masked_lm_prob <= 1:
        problems.append(f"masked_lm_prob {data.masked_lm_prob} is not a fraction above 0 and at most 1")
    if problems:
        raise HoldfastError("; ".join(problems))


def check_data(config: Config, force: bool = False) -> None:
    """Raises if the dataset is missing, exceeds the vocabulary, or was made with another tokenizer (with `force`: warns)."""
    from holdfast.data.indexed import IndexedDataset
    from holdfast.data.samples.blend import parse_data_path
    from holdfast.data.samples.gpt import check_token_range

    assert config.model.vocab_size is not None
    if config.model.model_type == "bert" and tokenizer_of(config) is None:
        raise HoldfastError("BERT masks tokens during training and needs the tokenizer: give vocab_file")
    prefixes = parse_data_path(config.data.data_path).prefixes
    if names := tokenizer_names(config.data):
        check_tokenizer(prefixes, names, warn=force or continues_run(config))
    for prefix in prefixes:
        check_token_range(IndexedDataset(prefix), config.model.vocab_size)


def check_tokenizer(prefixes: Sequence[str], names: Mapping[str, str], warn: bool) -> None:
    """Refuses data that another tokenizer made, where a PREFIX.json beside the data records the tokenizer."""
    from holdfast.data.preprocess.provenance import tokenizer_of_data

    recipe = recipe_of(names)
    accepted = {recipe.digest}
    if recipe.tokenizer_type == "HuggingFaceTokenizer":  # the same ids, with or without special tokens around a text
        accepted.add(
            read_recipe(recipe.tokenizer_type, None, None, names["tokenizer_model"], special_tokens=False).digest
        )
    for prefix in prefixes:
        made_with = tokenizer_of_data(prefix)
        if made_with is None or made_with["digest_sha256"] in accepted:
            continue
        file = next(names[key] for key in FILE_KEYS if key in names)
        problem = (
            f"{prefix} was made with {made_with['type']} of {made_with['vocab_size']:,} tokens (digest "
            f"{made_with['digest_sha256'][:12]}), but the tokenizer of this run is {describe(recipe)} in {file}"
        )
        if not warn:
            raise HoldfastError(
                f"{problem}; give the tokenizer that the data was made with, or --force to train anyway"
            )
        log(f"warning: {problem}")


def continues_run(config: Config) -> bool:
    """Whether the run folder already holds this run."""
    folder = Path(config.train.save) if config.train.save else None
    if folder is None or not (folder / "config.toml").is_file():
        return False
    return not differences(folder, read_config(folder / "config.toml"), config)

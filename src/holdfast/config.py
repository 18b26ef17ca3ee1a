"""The configuration of a run: dataclasses, TOML file and command line have the same keys.

Each section is a dataclass. Keys have Megatron's argument names and are unique across sections, so each key is also a flag. The
string under a field is its help text, on the command line and as comment in the printed file. None means unset: the file shows
the key commented out, and the code that needs the value derives it from other keys.
"""

import difflib
import inspect
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.config_files import find_config
from holdfast.system.errors import UsageError
from holdfast.system.field_docs import field_docs

TokenizerType = Literal[
    "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "HuggingFaceTokenizer",
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer",
]  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The model: its family and its shapes."""

    model_type: Literal["gpt", "bert"] = "gpt"
    """Model family: gpt (decoder, predicts the next token) or bert (encoder, predicts masked tokens and sentence pairs)."""
    num_layers: int = 12
    """Number of transformer layers."""
    hidden_size: int = 768
    """Width of the hidden states."""
    num_attention_heads: int = 12
    """Number of attention heads. Must divide hidden_size unless kv_channels is set."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP. Unset: 4 × hidden_size; with swiglu 8/3 × hidden_size, rounded down to a multiple of 64."""
    num_query_groups: int | None = None
    """Number of key/value heads, each shared by a group of query heads (GQA). Unset: num_attention_heads."""
    kv_channels: int | None = None
    """Width of one attention head. Unset: hidden_size / num_attention_heads."""
    max_position_embeddings: int | None = None
    """Longest sequence that the model accepts, in tokens. Unset: seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position encoding: learned embeddings (GPT-2, GPT-3, BERT) or rotary (Llama)."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm before each block and after the last layer."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    openai_gelu: bool = False
    """Compute GELU by its tanh approximation, as GPT-2 does, instead of exactly."""
    swiglu: bool = False
    """Use a gated MLP with SiLU (Llama) instead of GELU."""
    untie_embeddings_and_output_weights: bool = False
    """Use a separate output matrix instead of the transposed embedding."""
    disable_bias_linear: bool = False
    """Use linear layers without bias (Llama)."""
    hidden_dropout: float = 0.0
    """Dropout probability of the embeddings and of each block's output. Megatron's default is 0.1."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights. Megatron's default is 0.1."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights. Output layers of blocks: divided by sqrt(2 × num_layers)."""
    vocab_size: int | None = None
    """Number of tokens in the vocabulary. Unset: taken from the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """Pad the embedding to a multiple of this × tensor_model_parallel_size rows. Padded rows are never predicted."""
    bert_variant: Literal["megatron", "original"] = "megatron"
    """BERT: norm before each block (megatron) or after it (original)."""
    bert_no_binary_head: bool = False
    """BERT: leave out the pooler and the next-sentence head."""


@dataclass(frozen=True)
class DataConfig:
    """The training data and its tokenizer."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair, or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."""
    split: str = "969,30,1"
    """Fractions of the documents for training, validation and test, relative to their sum."""
    seq_length: int = 1024
    """Length of a sample in tokens."""
    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """Type of the tokenizer that made the data."""
    vocab_file: str | None = None
    """vocab.json (GPT-2) or vocab.txt (BERT): a file, a URL or a catalog name."""
    merge_file: str | None = None
    """merges.txt (GPT-2): a file, a URL or a catalog name."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, a SentencePiece model, or a tiktoken file."""
    data_cache_path: str | None = None
    """Folder for the sample indices. Unset: beside the data."""
    reset_position_ids: bool = False
    """GPT: restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """GPT: do not attend across end-of-document tokens."""
    eod_mask_loss: bool = False
    """GPT: exclude end-of-document tokens from the loss."""
    num_workers: int = 2
    """Number of threads that prefetch batches. 0: load in the training thread."""
    masked_lm_prob: float = 0.15
    """BERT: fraction of the tokens to mask."""
    short_seq_prob: float = 0.1
    """BERT: probability that a sample is shorter than seq_length."""
    bert_sentence_order: bool = False
    """BERT: the second head classifies swapped against ordered segments, instead of random against next ones."""
    bert_whole_word_mask: bool = False
    """BERT: mask all pieces of a word together."""
    bert_max_ngrams: int = 1
    """BERT: longest sequence of words that is masked together."""


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch size, precision, evaluation and checkpoints."""

    train_iters: int | None = None
    """Number of optimizer steps. Give this or train_samples."""
    train_samples: int | None = None
    """Number of training samples. Give this or train_iters."""
    micro_batch_size: int = 1
    """Samples per forward and backward pass of one rank."""
    global_batch_size: int | None = None
    """Samples per step over all ranks. Unset: micro_batch_size × data-parallel size."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: the global batch size grows from START in steps of INCREMENT over SAMPLES samples."""
    seed: int = 1234
    """Random seed of initial weights, sample order and dropout."""
    fp16: bool = False
    """Compute in fp16 with dynamic loss scaling. Weights, gradients and optimizer state stay in fp32."""
    bf16: bool = False
    """Compute in bf16. Weights, gradients and optimizer state stay in fp32."""
    eval_interval: int = 1000
    """Steps between evaluations on the validation split. 0: never."""
    eval_iters: int = 10
    """Number of batches per evaluation."""
    save: str | None = None
    """Run folder for configuration, metrics, events and checkpoints. Unset: the run keeps nothing."""
    load: str | None = None
    """Run or checkpoint folder to start from. Not used if the run's own state is found in `save`."""
    save_interval: int | None = None
    """Steps between checkpoints on disk. The last step is always saved."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep on disk. Unset: all."""
    keep_every: int | None = None
    """Always keep checkpoints whose step is a multiple of this, whatever keep_last is."""
    finetune: bool = False
    """With load: load only the weights and start at step 0."""
    no_load_optim: bool = False
    """With load: load weights and step, but not the optimizer state."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What to recompute in the backward pass to save memory: none, selective (attention) or full (whole layers)."""
    compile: bool | None = None
    """Compile the layers: Triton kernels where they cover the layer, else torch.compile. Unset: on CUDA only."""
    fp8: bool = False
    """With bf16: matrix products in fp8, except in the first and the last layer. Needs a GPU with fp8 (Ada, Hopper or newer)."""
    deterministic: bool = False
    """Use deterministic kernels only: a resumed run is bit-identical on CUDA too. On CPU it always is."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and loss scale."""

    optimizer: Literal["adam", "lamb"] = "adam"
    """adam (AdamW), or lamb for very large batches."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "polynomial"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Steps until min_lr is reached. Unset: the whole run."""
    lr_decay_samples: int | None = None
    """Samples until min_lr is reached, with train_samples. Unset: the whole run."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, with train_samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay, instead of lr_warmup_iters."""
    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the final decay."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential"] = "exponential"
    """WSD: shape of the final decay."""
    lr_poly_power: float = 0.5
    """Exponent of the polynomial decay (1 - progress)^power. Progress counts from the start of the warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay. Biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment (Adam and LAMB)."""
    adam_beta2: float = 0.999
    """Decay rate of the second moment (Adam and LAMB)."""
    adam_eps: float = 1e-8
    """Epsilon of Adam and LAMB."""
    clip_grad: float = 1.0
    """Clip gradients to this global norm. 0: no clipping."""
    initial_loss_scale: float = 2.0**32
    """fp16: initial loss scale."""
    min_loss_scale: float = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the loss scale doubles."""
    hysteresis: int = 2
    """fp16: overflows before the loss scale halves."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout of model and batch, and the start of the ranks."""

    tensor_model_parallel_size: int = 1
    """Number of ranks over which each layer's matrices are sharded."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline ranks, each with a consecutive group of layers."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Stages per pipeline rank. More than 1: interleaved schedule."""
    decoder_first_pipeline_num_layers: int | None = None
    """Number of layers in the first pipeline stage. Unset: as many as in the others."""
    decoder_last_pipeline_num_layers: int | None = None
    """Number of layers in the last pipeline stage. Unset: as many as in the others."""
    sequence_parallel: bool = False
    """With tensor parallelism: shard norms and dropout over the tokens of the sequence."""
    context_parallel_size: int = 1
    """Not supported: must be 1. Use sequence_parallel and recompute_granularity for long sequences."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim_grads_params"] = "no_shard"
    """no_shard: replicate the model (DDP). optim_grads_params: shard weights, gradients and optimizer (FSDP2, ZeRO-3)."""
    data_parallel_replicas: int = 1
    """With optim_grads_params: number of replicas of each shard (hybrid sharding)."""
    nproc_per_node: int = 1
    """Number of ranks that `holdfast train` starts on this node."""
    nnodes: int = 1
    """Number of nodes."""
    node_rank: int = 0
    """Number of this node, from 0."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of node 0, for several nodes. Unset: a free port of this host."""
    max_restarts: int = 3
    """How often to restart all ranks after failures before the run fails."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that a collective waits for a missing rank."""


@dataclass(frozen=True)
class SnapshotConfig:
    """Snapshots of the run's state in CPU memory."""

    snapshot_interval: int = 1
    """Steps between memory snapshots. 0: only saves copy the state."""
    snapshot_mode: Literal["node", "peer"] = "node"
    """node: each node holds the whole state. peer: each node holds its share and a copy of another node's share."""
    snapshot_dir: str = "/dev/shm"
    """Folder for the snapshots, on a memory file system."""
    hang_timeout: float = 0.0
    """Seconds without a heartbeat after which ranks count as hung and are restarted. 0: never."""


@dataclass(frozen=True)
class LogConfig:
    """Logging."""

    log_interval: int = 1
    """Steps between log lines."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    log: LogConfig = field(default_factory=LogConfig)


def read_config(path: Path | str) -> Config:
    """The configuration in a TOML file, or the packaged one of that name. Missing keys keep their defaults."""
    path = find_config(path)
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return config_from_tables(tables, source=str(path))


def config_from_tables(tables: Mapping[str, Any], source: str) -> Config:
    """The configuration of TOML tables; `source` names the file in errors."""
    sections, values = get_type_hints(Config), {}
    for name, table in tables.items():
        if name not in sections or not isinstance(table, Mapping):
            raise UsageError(f"{source}: {_not_a_section(name, table)}")
        values[name] = _section_from_table(sections[name], table, name, source)
    return Config(**values)


def _not_a_section(name: str, value: Any) -> str:
    """Why a top-level name of a file is wrong, and what to write instead."""
    section = section_of(name)
    if section and not isinstance(value, Mapping):
        return f"{name} is outside of any section; it belongs in [{section}]: write [{section}] in the line before it"
    if section:
        return f"{name} is a key, not a section; write {name} = ... under [{section}]"
    if name in config_keys():
        return f"{name} is a section; write [{name}] and its keys below"
    kind = f"section [{name}]" if isinstance(value, Mapping) else f"key '{name}'"
    return f"unknown {kind}{_nearest(name, [*config_keys(), *all_keys()])}"


def _section_from_table(section: Any, table: Mapping[str, Any], name: str, source: str) -> Any:
    hints, values = get_type_hints(section), {}
    for key, value in table.items():
        if key not in hints:
            right = section_of(key)
            hint = f"; it belongs in [{right}]" if right else _nearest(key, all_keys())
            raise UsageError(f"{source}: unknown key '{key}' in [{name}]{hint}")
        values[key] = _coerce(value, hints[key], f"{source}: {name}.{key}")
    return section(**values)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """The value in the type of the annotation, or a UsageError: TOML has fewer types than Python."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _coerce(value, next(choice for choice in choices if choice is not types.NoneType), where)
    if origin is Literal:
        if value not in choices:
            raise UsageError(f"{where} = {value!r}: choose one of {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str | int | float) else value
        return tuple(_coerce(str(item) if choices[0] is str else item, choices[0], where) for item in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise UsageError(f"{where} = {value!r}: expected {hint.__name__}, found {type(value).__name__}")
    return value


def config_to_toml(config: Config, comments: bool = False) -> str:
    """The complete file: every key, unset ones commented out. Reading it gives the same configuration."""
    lines = []
    for section in fields(config):
        table = getattr(config, section.name)
        docs = field_docs(type(table)) if comments else {}
        if comments:
            lines.append(f"# {inspect.getdoc(type(table))}")
        lines.append(f"[{section.name}]")
        for key in fields(table):
            value = getattr(table, key.name)
            line = f"# {key.name} =" if value is None else f"{key.name} = {_toml_value(value)}"
            lines += [f"# {docs[key.name]}", line, ""] if comments else [line]
        if not comments:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04X}" for c in escaped)
        return f'"{escaped}"'
    return repr(value)


@cache
def config_keys() -> dict[str, tuple[str, ...]]:
    """Section → its keys."""
    hints = get_type_hints(Config)
    return {section.name: tuple(key.name for key in fields(hints[section.name])) for section in fields(Config)}


def section_of(key: str) -> str | None:
    """The section of a key; None for an unknown key."""
    return next((section for section, keys in config_keys().items() if key in keys), None)


def all_keys() -> list[str]:
    return [key for keys in config_keys().values() for key in keys]


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; perhaps you meant '{near[0]}'" if near else ""

"""The configuration of a run: dataclasses, the TOML file and the command line, three views of the same keys.

Sections are dataclasses; keys carry Megatron's argument names and are unique across sections, so each key is also a flag. The
string under a field is its help, on the command line and as comment in the printed file. A value that is None is unset: the
file shows it commented out, and the code that needs it derives it from the others.
"""

import difflib
import inspect
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.config_files import find_config
from holdfast.system.errors import UsageError
from holdfast.system.field_docs import field_docs

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
]


@dataclass(frozen=True)
class ModelConfig:
    """The function that is trained: its family and its shapes."""

    model_type: Literal["gpt", "bert"] = "gpt"
    """Family: gpt (decoder, next token) or bert (encoder, masked tokens and sentence pairs)."""
    num_layers: int = 12
    """Transformer layers."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_attention_heads: int = 12
    """Attention heads; must divide hidden_size unless kv_channels is given."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP. Unset: 4 × hidden_size, or 8/3 × hidden_size rounded down to 64 with swiglu."""
    num_query_groups: int | None = None
    """Key/value heads shared by groups of query heads (GQA). Unset: as many as heads."""
    kv_channels: int | None = None
    """Width of one head. Unset: hidden_size / num_attention_heads."""
    max_position_embeddings: int | None = None
    """Longest sequence the positions allow. Unset: seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Learned positions (GPT-2, GPT-3, BERT) or rotary ones (Llama)."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm in front of each block and at the end."""
    norm_epsilon: float = 1e-5
    """Epsilon inside the norms."""
    openai_gelu: bool = False
    """GELU by its tanh approximation, as GPT-2 has it, instead of the exact one."""
    swiglu: bool = False
    """Gated MLP with SiLU (Llama) instead of GELU."""
    untie_embeddings_and_output_weights: bool = False
    """A separate output matrix instead of the transposed embedding."""
    disable_bias_linear: bool = False
    """Linear layers without bias (Llama)."""
    hidden_dropout: float = 0.0
    """Dropout on embeddings and on what each block adds. Megatron's default is 0.1; most runs today use none."""
    attention_dropout: float = 0.0
    """Dropout on attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; output layers of blocks get it divided by sqrt(2 × num_layers)."""
    vocab_size: int | None = None
    """Number of tokens. Unset: taken from the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """The embedding has a multiple of this × tensor_model_parallel_size rows; padded tokens are never predicted."""
    bert_variant: Literal["megatron", "original"] = "megatron"
    """BERT with the norm before each block (Megatron) or after it (the original)."""
    bert_no_binary_head: bool = False
    """BERT without pooler and next-sentence head."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair, or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test, relative to their sum."""
    seq_length: int = 1024
    """Tokens per sample."""
    tokenizer_type: TokenizerType = "GPT2BPETokenizer"
    """Kind of tokenizer that made the data."""
    vocab_file: str | None = None
    """vocab.json (GPT-2) or vocab.txt (BERT); a catalog name works too."""
    merge_file: str | None = None
    """merges.txt (GPT-2)."""
    tokenizer_model: str | None = None
    """tokenizer.json or its folder, a SentencePiece model, or a tiktoken file."""
    data_cache_path: str | None = None
    """Folder of the sample indices. Unset: beside the data."""
    reset_position_ids: bool = False
    """Positions start again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Attention does not cross an end-of-document token."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    num_workers: int = 2
    """Threads that prefetch batches; 0 loads in the training thread."""
    masked_lm_prob: float = 0.15
    """BERT: share of the tokens that are masked."""
    short_seq_prob: float = 0.1
    """BERT: probability that a sample is made shorter than seq_length."""
    bert_sentence_order: bool = False
    """BERT: the second head tells swapped from ordered segments instead of random from next ones."""
    bert_whole_word_mask: bool = False
    """BERT: all pieces of a word are masked together."""
    bert_max_ngrams: int = 1
    """BERT: longest run of words masked together."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, in what portions, at which precision, and what is kept."""

    train_iters: int | None = None
    """Number of optimizer steps."""
    train_samples: int | None = None
    """Number of samples, instead of train_iters."""
    micro_batch_size: int = 1
    """Samples that one rank computes at once."""
    global_batch_size: int | None = None
    """Samples per step over all ranks. Unset: micro_batch_size × data-parallel size."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."""
    seed: int = 1234
    """Decides weights, sample order and dropout."""
    fp16: bool = False
    """Compute in fp16 with dynamic loss scaling; weights stay fp32."""
    bf16: bool = False
    """Compute in bf16; weights, gradients and optimizer stay fp32."""
    eval_interval: int = 1000
    """Steps between evaluations on the validation split; 0 never evaluates."""
    eval_iters: int = 10
    """Batches per evaluation."""
    save: str | None = None
    """Run folder: configuration, metrics, events, checkpoints."""
    load: str | None = None
    """Run or checkpoint folder to continue from. A run that finds its own state in `save` continues without it."""
    save_interval: int | None = None
    """Steps between checkpoints on disk; one is written at the end in any case."""
    keep_last: int | None = None
    """Checkpoints to keep on disk, newest first. Unset: all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept whatever keep_last says."""
    finetune: bool = False
    """Load the weights only and start at step 0."""
    no_load_optim: bool = False
    """Load weights and step, but not the optimizer."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward to save memory: none, the attention, or whole layers."""
    compile: bool | None = None
    """torch.compile each layer. Unset: on CUDA yes, on CPU no."""
    deterministic: bool = False
    """Only deterministic kernels, so that a resumed run is bit-identical on CUDA too (it is on CPU anyway)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights change."""

    optimizer: Literal["adam", "lamb"] = "adam"
    """AdamW, or LAMB for very large batches."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "polynomial"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Steps until min_lr. Unset: the whole run."""
    lr_decay_samples: int | None = None
    """Samples until min_lr, for runs given in samples."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, for runs given in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay length, instead of lr_warmup_iters."""
    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the final decay."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential"] = "exponential"
    """WSD: shape of the final decay."""
    lr_poly_power: float = 0.5
    """Exponent of the polynomial decay, (1 - progress) to this power; progress counts from the start of the warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Epsilon of Adam and LAMB."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 never clips."""
    initial_loss_scale: float = 2.0**32
    """fp16: first loss scale."""
    min_loss_scale: float = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow until the scale doubles."""
    hysteresis: int = 2
    """fp16: overflows until the scale halves."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are cut over ranks, and how the ranks are started."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Groups of consecutive layers, each on its own ranks."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Stages per pipeline rank; more than one is the interleaved schedule."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline stage, if stages are uneven."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline stage, if stages are uneven."""
    sequence_parallel: bool = False
    """Norms and dropout work on a share of the sequence each (with tensor parallelism)."""
    context_parallel_size: int = 1
    """Ranks that share each sequence (CUDA only)."""
    data_parallel_sharding_strategy: Literal["no_shard", "optim_grads_params"] = "no_shard"
    """Data parallelism with whole replicas (DDP) or with sharded weights, gradients and optimizer (FSDP2, ZeRO-3)."""
    data_parallel_replicas: int = 1
    """Sharded data parallelism only: number of replicas of each shard (hybrid sharding)."""
    nproc_per_node: int = 1
    """Ranks that `holdfast train` starts on this node."""
    nnodes: int = 1
    """Nodes of the run."""
    node_rank: int = 0
    """This node's number."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of node 0. Unset: a free port on this machine."""
    max_restarts: int = 3
    """Restarts of all ranks after failures, until the run gives up."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that a collective waits for a missing rank."""


@dataclass(frozen=True)
class SnapshotConfig:
    """The copy of the run's state in CPU memory."""

    snapshot_interval: int = 1
    """Steps between memory snapshots; 0 takes none."""
    snapshot_mode: Literal["node", "peer"] = "node"
    """node: every node holds the whole state; peer: each node's share is also held by one other node."""
    snapshot_dir: str = "/dev/shm"
    """Memory file system that holds the snapshots."""
    hang_timeout: float = 0.0
    """Seconds without a heartbeat after which the ranks count as hung and are restarted; 0 never."""


@dataclass(frozen=True)
class LogConfig:
    """What is reported."""

    log_interval: int = 1
    """Steps between log lines."""
    tensorboard: bool = True
    """Write event files into the run folder."""


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
    """The configuration in a TOML file, or of that name; keys that it leaves out keep their defaults."""
    path = find_config(path)
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return config_from_tables(tables, source=str(path))


def config_from_tables(tables: Mapping[str, Any], source: str) -> Config:
    sections = {section.name: section.type for section in fields(Config)}
    changes: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in sections or not isinstance(table, Mapping):
            raise UsageError(f"{source}: {_not_a_section(name, table)}")
        changes[name] = _section_from_table(get_type_hints(Config)[name], table, name, source)
    return replace(Config(), **changes)


def _not_a_section(name: str, value: Any) -> str:
    """Why a top-level name of a file is wrong, and what to write instead."""
    home = section_of(name)
    if home and not isinstance(value, Mapping):
        return f"{name} stands outside of any section; it belongs in [{home}]: write [{home}] in the line before it"
    if home:
        return f"{name} is a key, not a section; write {name} = ... under [{home}]"
    if name in config_keys():
        return f"{name} is a section; write [{name}] and its keys below"
    kind = f"section [{name}]" if isinstance(value, Mapping) else f"key '{name}'"
    return f"unknown {kind}{_nearest(name, [*config_keys(), *all_keys()])}"


def _section_from_table(section: Any, table: Mapping[str, Any], name: str, source: str) -> Any:
    hints = get_type_hints(section)
    values = {}
    for key, value in table.items():
        if key not in hints:
            home = section_of(key)
            hint = f"; it belongs in [{home}]" if home else _nearest(key, all_keys())
            raise UsageError(f"{source}: unknown key '{key}' in [{name}]{hint}")
        values[key] = _coerce(value, hints[key], f"{source}: {name}.{key}")
    return section(**values)


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotation wants it, or a UsageError: TOML has fewer types than Python."""
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
    """The complete file: every key, unset ones commented out, so that it reloads to the same configuration."""
    lines = []
    for section in fields(config):
        table = getattr(config, section.name)
        docs = field_docs(type(table)) if comments else {}
        if comments:
            lines.append(f"# {inspect.getdoc(type(table))}")
        lines.append(f"[{section.name}]")
        for key in fields(table):
            if comments:
                lines.append(f"# {docs[key.name]}")
            value = getattr(table, key.name)
            lines.append(f"# {key.name} =" if value is None else f"{key.name} = {_toml_value(value)}")
            if comments:
                lines.append("")
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
    return next((section for section, keys in config_keys().items() if key in keys), None)


def all_keys() -> list[str]:
    return [key for keys in config_keys().values() for key in keys]


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; perhaps you meant '{near[0]}'" if near else ""

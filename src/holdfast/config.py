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
from holdfast.model_config import ModelConfig as ModelConfig
from holdfast.model_config import model_problems as model_problems
from holdfast.model_config import needs_plain_layers as needs_plain_layers
from holdfast.optimizer_config import OptimizerConfig as OptimizerConfig
from holdfast.system.errors import UsageError
from holdfast.system.field_docs import field_docs
from holdfast.system.other_names import own_name, reason_to_leave_out

TokenizerType = Literal[
    "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "HuggingFaceTokenizer",
    "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer",
]  # fmt: skip


@dataclass(frozen=True)
class DataConfig:
    """The training data and its tokenizer."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair, or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."""
    split: str = "969,30,1"
    """Fractions of the documents for training, validation and test, relative to their sum."""
    seq_length: int = 1024
    """Length of a sample in tokens."""
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    """GPT: concatenate cuts samples from documents laid end to end (Megatron); best-fit packs whole documents, and pads."""
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
    eval_samples: int = 0
    """Texts that the model generates at each evaluation, into samples.jsonl of the run folder and the log (GPT)."""
    eval_prompts: str | None = None
    """File with the prompts of eval_samples, one per line. Unset: beginnings of validation samples."""
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
    attention_backend: Literal["auto", "cudnn", "flash", "efficient", "short", "flash4", "cudnn-flash4"] = "auto"
    """Attention kernel of the Triton layers. auto: the fastest for the run's shape, measured once per device and shape. short
    takes up to 128 tokens; flash4 and cudnn-flash4 need the extra `cuda`."""
    mlp_backend: Literal["auto", "separate", "quack"] = "auto"
    """GELU of the Triton layers: separate kernels, or quack's products that compute it (extra `cuda`). auto: the faster."""
    cuda_graph: bool | None = None
    """Record forward and backward as a CUDA graph, on one GPU. Unset: unless a pass is slower with it."""
    fp8: bool = False
    """With bf16: matrix products in fp8, except in the first and the last layer. Needs a GPU with fp8 (Ada, Hopper or newer)."""
    fp8_recipe: Literal["tensorwise", "delayed"] = "delayed"
    """Scales of activations and gradients: tensorwise from themselves; delayed from recent passes: faster, less accurate."""
    deterministic: bool = False
    """Use deterministic kernels only: a resumed run is bit-identical on CUDA too. On CPU it always is."""


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
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "no_shard"
    """no_shard: replicate (DDP). optim: shard the optimizer (ZeRO-1). optim_grads: ZeRO-2. optim_grads_params: ZeRO-3 (FSDP2)."""
    use_distributed_optimizer: bool = False
    """Megatron's name of data_parallel_sharding_strategy = "optim"; the printed configuration has that key instead."""
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
    fork_server: bool = True
    """Fork the ranks from one process per node that has imported everything: a restart imports nothing. Linux only."""
    standby: bool = False
    """Keep one spare process per rank ready, which takes over when a rank dies. Costs memory, also on the GPU; needs save."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that a collective waits for a missing rank."""

    def __post_init__(self) -> None:
        """Replaces use_distributed_optimizer by the key that it stands for: a strategy that is given later then takes effect."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            object.__setattr__(self, "data_parallel_sharding_strategy", "optim")
        object.__setattr__(self, "use_distributed_optimizer", False)


@dataclass(frozen=True)
class SnapshotConfig:
    """Snapshots of the run's state in CPU memory."""

    snapshot_interval: int = 1
    """Steps between memory snapshots. 0: only saves copy the state."""
    snapshot_max_slowdown: float = 0.02
    """Share of its time that a GPU may wait for snapshots; above it, snapshot_interval grows. 0: it never grows."""
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
    profile: str | None = None
    """FIRST:LAST, steps to trace with torch's profiler into RUN/profile/rank-N.json.gz, for example 10:13."""
    wandb_project: str | None = None
    """Send metrics to this project of Weights & Biases. WANDB_MODE=offline writes them into the run folder instead."""
    wandb_exp_name: str | None = None
    """Name of the run at Weights & Biases. Unset: the name of the run folder."""
    wandb_entity: str | None = None
    """User or team that owns the project. Unset: your default at Weights & Biases."""
    mlflow_experiment: str | None = None
    """Send metrics to this experiment of MLflow."""
    mlflow_tracking_uri: str | None = None
    """MLflow's server or database. Unset: MLFLOW_TRACKING_URI."""
    trackio_project: str | None = None
    """Write metrics to this project of trackio."""
    metrics_port: int | None = None
    """Serve the newest metrics for Prometheus at /metrics on this port of rank 0's node; 0 chooses a free one."""
    metrics_host: str = "127.0.0.1"
    """Address of --metrics-port. 0.0.0.0 lets every machine that reaches this node read the metrics."""


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
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
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
    own, note = own_name(word)
    if own in known:
        return f"; here it is {own} in [{section_of(own)}]{f' ({note})' if note else ''}"
    if reason := reason_to_leave_out(word):
        return f"; {reason}"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; perhaps you meant '{near[0]}'" if near else ""

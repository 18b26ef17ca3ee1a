"""`holdfast train CONFIG.toml`: applies flags to the file, checks everything, then runs the ranks of this node."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path
from typing import Any

from holdfast.command_line import flags
from holdfast.config import Config, config_to_toml, section_of
from holdfast.config_files import known_configs
from holdfast.system.errors import UsageError
from holdfast.system.progress import count_of, log

ALTERNATIVES = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
)
"""Keys that set the same length. One that is given as a flag replaces the others of the file."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Pretrain a GPT or BERT model: checks the configuration, starts and supervises the ranks of this node.

    Every key of the configuration is also a flag. Flags take precedence over the file.

    Examples:

      holdfast train gpt_tiny --data-path corpus_text_document --save runs/first \\
          --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt
      holdfast train gpt2_345m --nproc-per-node 8 --data-path corpus_text_document --save runs/345m
      holdfast train runs/first/config.toml              # repeats or continues that run
      holdfast train gpt3_175b --nnodes 128 --nproc-per-node 8 --dry-run
      holdfast train --print-config > my.toml            # every key, commented
      torchrun --nproc-per-node 2 -m holdfast.train runs/first/config.toml
    """

    file: str | None = field(default=None, metadata=flags.positional("CONFIG"))
    """Configuration: a TOML file, or the name of one that comes with Holdfast, such as gpt_tiny. Unset: the defaults below."""
    print_config: bool = False
    """Print the complete configuration, commented, and start nothing."""
    dry_run: bool = False
    """Describe the layout and estimate its memory, and start nothing."""
    force: bool = False
    """Train on data that was made with another tokenizer."""
    panel: bool = True
    """On a terminal, show a live panel above the last log lines; --no-panel prints the lines alone. Files and Slurm jobs never
    get a panel."""
    json: bool = False
    """When the run ends, print JSON: run folder, iteration, losses, checkpoint, and whether the run finished."""
    vocab_size_given: bool = field(default=False, metadata=flags.derived())
    """Whether vocab_size comes from the command line, not from a file that may be for another tokenizer."""
    config: Config = field(default_factory=Config)

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
        from holdfast.train.run_folder.identity import read_run_config

        read = {"config": _without_alternatives(read_run_config(given["file"]), given)} if given.get("file") else {}
        return {"vocab_size_given": "vocab_size" in given, **read}


def _without_alternatives(config: Config, given: Mapping[str, Any]) -> Config:
    """The configuration of a file without the keys that a flag replaces by another one."""
    for keys in ALTERNATIVES:
        if any(key in given for key in keys):
            name = str(section_of(keys[0]))
            section = getattr(config, name)
            config = replace(config, **{name: replace(section, **{key: getattr(type(section)(), key) for key in keys})})
    return config


def parse(arguments: Sequence[str]) -> TrainOptions:
    """The options of a command line; `config` is the file with the flags applied."""
    return flags.parse(TrainOptions, "holdfast train", arguments)


def train_command(options: TrainOptions) -> None:
    if options.print_config:
        print(config_to_toml(options.config, comments=True), end="")
        return
    if options.config == Config() and not options.dry_run:
        raise UsageError(_how_to_start())
    from holdfast.train.checks.host import check_host
    from holdfast.train.checks.preflight import check_data, resolve
    from holdfast.train.checks.unused_keys import unused_keys
    from holdfast.train.run_folder.opening import check_run_folder, open_run_folder

    config, layout = resolve(take_slurm(options.config), vocab_size_given=options.vocab_size_given)
    if options.dry_run:
        from holdfast.train.checks.estimate import describe

        description = describe(config, layout)
        print(dumps({"ranks": layout.world, "description": description}) if options.json else description)
        return
    check_data(config, options.force)
    converts = _loads_other_format(config)
    check_run_folder(config)
    warnings = [*unused_keys(config), *check_host(config)]
    for line in (_start_line(config), *warnings):
        log(line)
    with _interrupt_exits():
        from holdfast.train.panel.screen import live_panel
        from holdfast.train.run_folder.result import print_result
        from holdfast.train.supervisor import run_ranks
    with open_run_folder(config) as config, print_result(config.train.save) if options.json else nullcontext():
        if converts:
            from holdfast.conversion.train_load import with_converted_load

            config = with_converted_load(config)
        with live_panel(config, options.panel):
            run_ranks(config)


def _how_to_start() -> str:
    """What a run needs, for a command line that names neither a model nor data."""
    return f"""give a configuration and the data to train on, for example:
  holdfast train gpt_tiny --data-path corpus_text_document --vocab-file vocab.json --merge-file merges.txt --save runs/first
Configurations that come with Holdfast: {", ".join(known_configs())}.
From plain text (tokenizer, dataset and configuration): holdfast init my-model --input corpus.jsonl
Every key with its meaning: holdfast train --print-config. To see a whole run first: holdfast demo --fast"""


def _start_line(config: Config) -> str:
    parallel, save = config.parallel, config.train.save
    node = f" on node {parallel.node_rank} of {parallel.nnodes}" if parallel.nnodes > 1 else ""
    return f"starting {count_of(parallel.nproc_per_node, 'rank')}{node}" + (f", run folder {save}" if save else "")


def _loads_other_format(config: Config) -> bool:
    if config.train.load is None:
        return False
    from holdfast.conversion.train_load import loads_other_format

    return loads_other_format(config)


def refuse_other_format(config: Config) -> None:
    """Raises if --load names a checkpoint of another format: ranks under torchrun do not convert it."""
    if _loads_other_format(config):
        from holdfast.conversion.train_load import refuse

        refuse(Path(str(config.train.load)))


@contextmanager
def _interrupt_exits() -> Iterator[None]:
    """While torch is imported, Ctrl-C ends the process at once: an exception inside a C extension's import prints tracebacks."""

    def leave(*_: object) -> None:
        os.write(2, b"holdfast: error: interrupted before the ranks started; nothing was written\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def take_slurm(config: Config) -> Config:
    """Takes nnodes and node_rank from Slurm under srun with one task per node, unless flags set them."""
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if config.parallel.nnodes != 1 or nodes == 1 or tasks != nodes:
        return config
    if config.parallel.rdzv_endpoint is None:
        raise UsageError("under srun with several nodes give --rdzv-endpoint HOST:PORT, HOST being the first node")
    node = int(os.environ["SLURM_NODEID"])
    log(f"slurm: {nodes} nodes, this is node {node}, rendezvous at {config.parallel.rdzv_endpoint}")
    return replace(config, parallel=replace(config.parallel, nnodes=nodes, node_rank=node))

"""`holdfast train CONFIG.toml`: flags on top of the file, checks before any rank starts, then the ranks of this node."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast import flags
from holdfast.config import Config, config_to_toml
from holdfast.errors import UsageError
from holdfast.progress import say


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Pretrain a GPT or BERT model: checks the configuration, starts and supervises the ranks of this node.

    Every key of the configuration is also a flag, and flags win over the file.

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
    """Describe the layout and its memory, and start nothing."""
    force: bool = False
    """Train on data that another tokenizer made."""
    json: bool = False
    """When the run ends, print run folder, iteration, losses, checkpoint and whether it finished as JSON."""
    vocab_size_given: bool = field(default=False, metadata=flags.derived())
    """Whether vocab_size comes from the command line, and not from a file that was made for another tokenizer."""
    config: Config = field(default_factory=Config)

    @staticmethod
    def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
        from holdfast.train.identity import read_run_config

        read = {"config": read_run_config(given["file"])} if given.get("file") else {}
        return {"vocab_size_given": "vocab_size" in given, **read}


def parse(arguments: Sequence[str]) -> TrainOptions:
    """The options of a command line; their `config` is what file and flags make together."""
    return flags.parse(TrainOptions, "holdfast train", arguments)


def train_command(options: TrainOptions) -> None:
    if options.print_config:
        print(config_to_toml(options.config, comments=True), end="")
        return
    config = take_slurm(options.config)
    from holdfast.train.preflight import check_data, open_run_folder, resolve

    config, layout = resolve(config, vocab_size_given=options.vocab_size_given)
    if options.dry_run:
        from json import dumps

        from holdfast.train.estimate import describe

        description = describe(config, layout)
        print(dumps({"ranks": layout.world, "description": description}) if options.json else description)
        return
    check_data(config, options.force)
    from holdfast.conversion.for_training import loads_other_format, with_converted_load

    converts = loads_other_format(config)
    config = open_run_folder(config)
    if converts:
        config = with_converted_load(config)
    from holdfast.train.result import print_result
    from holdfast.train.supervisor import start_ranks

    with print_result(config.train.save) if options.json else nullcontext():
        start_ranks(config)


def take_slurm(config: Config) -> Config:
    """Under srun with one task per node, the nodes and this one's number come from Slurm where no flag gave them."""
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if config.parallel.nnodes != 1 or nodes == 1 or tasks != nodes:
        return config
    if config.parallel.rdzv_endpoint is None:
        raise UsageError("under srun with several nodes give --rdzv-endpoint HOST:PORT, HOST being the first node")
    node = int(os.environ["SLURM_NODEID"])
    say(f"slurm: {nodes} nodes, this is node {node}, rendezvous at {config.parallel.rdzv_endpoint}")
    return replace(config, parallel=replace(config.parallel, nnodes=nodes, node_rank=node))


def worker_main() -> None:
    """`python -m holdfast.train`: one rank, started by the supervisor or by torchrun."""
    from holdfast.train.preflight import check_data, open_run_folder, resolve
    from holdfast.train.worker import Refused, run_worker

    options = parse(sys.argv[1:])
    supervised = "HOLDFAST_SUPERVISED" in os.environ  # then vocab_size is settled, and the run folder is open
    given = supervised or options.vocab_size_given
    config, _ = resolve(options.config, int(os.environ.get("WORLD_SIZE", "1")), given)
    if os.environ.get("RANK", "0") == "0" and not supervised:
        from holdfast.conversion.for_training import loads_other_format, refuse

        check_data(config, options.force)
        if loads_other_format(config):
            refuse(Path(str(config.train.load)))
        config = open_run_folder(config)
    try:
        run_worker(config)
    except Refused as error:
        if "HOLDFAST_SUPERVISED" not in os.environ:  # the supervisor says it once for all ranks
            say(str(error))
        os._exit(1)
    except Exception:
        sys.excepthook(*sys.exc_info())
        # at once: torch's communication threads may abort an interpreter that ends in the middle of a collective
        os._exit(1)

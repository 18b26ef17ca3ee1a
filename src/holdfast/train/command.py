"""`holdfast train CONFIG.toml`: flags on top of the file, checks before any rank starts, then the ranks of this node."""

import os
import sys
from dataclasses import replace

from holdfast.config import Config, config_to_toml, read_config
from holdfast.errors import UsageError
from holdfast.progress import say

HELP = """Pretrain a GPT or BERT model: checks the configuration, starts and supervises the ranks of this node.

Every key of the configuration is also a flag, and flags win over the file. Examples:

  holdfast train configs/gpt_tiny.toml --data-path my-data_text_document --save runs/first
  holdfast train configs/gpt2_345m.toml --nproc-per-node 8 --tensor-model-parallel-size 2 --save runs/345m
  holdfast train runs/first/config.toml              # repeats or continues that run
  holdfast train configs/gpt3_175b.toml --nnodes 128 --nproc-per-node 8 --dry-run
  holdfast train --print-config > my.toml            # every key, commented
  torchrun --nproc-per-node 2 -m holdfast.train configs/gpt_tiny.toml --save runs/second
"""


def parse(arguments: list[str]) -> tuple[Config, set[str]]:
    """The configuration that file and flags make together, and the switches that are not configuration."""
    switches = {"--print-config", "--dry-run"} & set(arguments)
    rest = [argument for argument in arguments if argument not in switches]
    base = Config()
    if rest and not rest[0].startswith("-"):
        base = read_config(rest.pop(0))
    import tyro

    flat = tyro.conf.configure(tyro.conf.OmitArgPrefixes)(Config)
    epilogue = (
        "other options: --print-config prints the complete file; --dry-run describes the layout and starts nothing."
    )
    config = tyro.cli(
        flat, prog="holdfast train [CONFIG.toml]", default=base, args=rest, description=f"{HELP}\n{epilogue}"
    )
    return config, switches


def train_command(arguments: list[str]) -> None:
    config, switches = parse(arguments)
    if "--print-config" in switches:
        print(config_to_toml(config, comments=True), end="")
        return
    config = take_slurm(config)
    from holdfast.train.preflight import check_data, open_run_folder, resolve

    config, layout = resolve(config)
    if "--dry-run" in switches:
        from holdfast.train.estimate import describe

        print(describe(config, layout))
        return
    check_data(config)
    open_run_folder(config)
    from holdfast.train.supervisor import start_ranks

    start_ranks(config)


train_command.parses_its_own_arguments = True  # type: ignore[attr-defined]


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

    config, _ = parse(sys.argv[1:])
    config, _ = resolve(config, int(os.environ.get("WORLD_SIZE", "1")))
    if os.environ.get("RANK", "0") == "0" and "HOLDFAST_SUPERVISED" not in os.environ:
        check_data(config)
        open_run_folder(config)
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

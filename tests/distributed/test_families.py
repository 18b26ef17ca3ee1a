"""Every family of GPT options, with real gloo ranks: the losses of one process in every layout, and no change by kill -9."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.config import Config, ParallelConfig
from holdfast.system.journal import read_journal
from holdfast.train.checks.preflight import resolve
from holdfast.train.worker import run_worker
from tests.corpus import write_dataset
from tests.distributed.test_kill import assert_same_state, final_state
from tests.distributed.test_layouts import SHARDED, assert_same_curve, tiny
from tests.gloo import spawn_ranks
from tests.models.families import FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAYOUTS = {
    "dp2": ParallelConfig(),
    "fsdp2": ParallelConfig(data_parallel_sharding_strategy=SHARDED),
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
}


def train_in_turn(configs: list[Config], port: int) -> None:
    """Several runs in the same processes, as attempts over one store: starting ranks takes longer than these runs."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt, config in enumerate(configs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        run_worker(config)


def train_until_killed(config: Config, port: int, step: int) -> None:
    """Trains; rank 1 kills itself in the optimizer's step after `step` whole ones."""
    begun = []

    def kill(*_: object) -> None:
        begun.append(True)
        if len(begun) > step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_pre_hook(kill)
    train_in_turn([config], port)


def open_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def configure(prefix: Path, folder: Path, world: int, parallel: ParallelConfig) -> list[Config]:
    """The run of every family, in its own folder."""
    parallel = replace(parallel, nproc_per_node=world)
    plain = [tiny(prefix, folder / name, **options) for name, options in FAMILIES.items()]
    short = [replace(config, train=replace(config.train, train_iters=6)) for config in plain]
    return [resolve(replace(config, parallel=parallel), world)[0] for config in short]


def train_all(prefix: Path, folder: Path, world: int, parallel: ParallelConfig) -> Path:
    store = open_store()
    spawn_ranks(world, train_in_turn, configure(prefix, folder, world, parallel), store.port)
    return folder


def curve(run: Path) -> list[dict[str, float]]:
    return list(read_journal(run / "metrics.jsonl"))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def single_process(prefix, tmp_path_factory):
    return train_all(prefix, tmp_path_factory.mktemp("alone"), 1, ParallelConfig())


@pytest.fixture(scope="module")
def sharded(prefix, tmp_path_factory):
    return train_all(prefix, tmp_path_factory.mktemp("sharded"), 2, LAYOUTS["fsdp2"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_are_those_of_one_process(layout, single_process, prefix, tmp_path, request):
    shared = layout == "fsdp2"
    found = request.getfixturevalue("sharded") if shared else train_all(prefix, tmp_path, 2, LAYOUTS[layout])
    for name in FAMILIES:
        assert_same_curve(curve(found / name), curve(single_process / name))


def test_a_killed_rank_changes_nothing(sharded, prefix, tmp_path):
    """Each family loses a rank in its fourth step; one set of new ranks then resumes all of them."""
    configs = configure(prefix, tmp_path, 2, LAYOUTS["fsdp2"])
    for config in configs:
        store = open_store()
        with pytest.raises(AssertionError, match="rank"):
            spawn_ranks(2, train_until_killed, config, store.port, 3)
    store = open_store()
    spawn_ranks(2, train_in_turn, configs, store.port)
    for name in FAMILIES:
        resumed = [event for event in read_journal(tmp_path / name / "events.jsonl") if event["event"] == "resumed"]
        assert [(event["source"], event["step"]) for event in resumed] == [("memory", 3)]
        assert_same_state(final_state(tmp_path / name), final_state(sharded / name))
        assert curve(tmp_path / name)[-1]["loss"] == curve(sharded / name)[-1]["loss"]

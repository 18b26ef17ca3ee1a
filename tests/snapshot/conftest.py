import os

import pytest

from tests.snapshot.harness import Run, memory_folder, run_to_the_end


@pytest.fixture
def memory():
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    """What an undisturbed run of a layout holds after each step, and at its end: hashes, computed once."""
    known = {}

    def look_up(run: Run) -> dict[int, str]:
        key = (run.layout, run.world, run.width, max(60, run.steps))
        if key not in known:
            known[key] = record(tmp_path_factory.mktemp("oracle"), run)
        return known[key]

    return look_up


def record(folder, run: Run) -> dict[int, str]:
    from tests.snapshot.harness import context

    answers = context.SimpleQueue()
    store = str(folder / "store")
    ranks = [
        context.Process(target=undisturbed, args=(rank, run, store, answers), daemon=True) for rank in range(run.world)
    ]
    for rank in ranks:
        rank.start()
    hashes = answers.get()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0, f"a rank of the undisturbed run ended with {rank.exitcode}"
    return hashes


def undisturbed(rank, run, store, answers):
    """The same training without any snapshot: the hash after every step."""
    import torch
    import torch.distributed as dist

    from tests.snapshot.harness import build, state_hash

    torch.set_num_threads(1)
    if run.world > 1 or run.layout != "ddp":
        dist.init_process_group("gloo", store=dist.FileStore(store, run.world), rank=rank, world_size=run.world)
    model, optimizer = build(run)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    torch.manual_seed(100 + (rank % 2 if run.layout == "tp" else rank))
    data = torch.Generator()
    hashes = {}
    for step in range(max(60, run.steps)):
        data.manual_seed(step * 1000 + (0 if run.layout == "tp" else rank))
        loss = model(torch.randn(4, run.width, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        hashes[step + 1] = state_hash(model, optimizer)
    if rank == 0:
        answers.put(hashes)
    if dist.is_initialized():
        dist.barrier()


@pytest.fixture
def run(tmp_path, memory):
    return Run(tmp_path / "run", memory)


@pytest.fixture
def check(oracle):
    """Runs to the end and asserts what every fault must leave true; the number of restarts."""

    def go(run: Run, lost: int = 1, sources: tuple[str, ...] = ("memory",), restarts: int = 3, **more) -> int:
        from tests.snapshot.harness import nothing_left, wait_for

        taken = run_to_the_end(run, restarts, **more)
        hashes = oracle(run)
        for restored in run.trace("restored"):
            if restored["step"]:
                assert restored["hash"] == hashes[restored["step"]], f"not the state of step {restored['step']}"
                assert restored["seen"] == list(range(1, restored["step"] + 1))
        ended = run.trace("ended")[-run.world :]
        assert {end["hash"] for end in ended} == {hashes[run.steps]}, (
            "the final state differs from the undisturbed run's"
        )
        for event in run.events("resumed"):
            assert event["steps_lost"] <= lost, event
            assert event["source"] in sources, event
        wait_for(lambda: nothing_left(run.memory), f"{run.memory} to be empty: {list(os.walk(run.memory))}")
        return taken

    return go

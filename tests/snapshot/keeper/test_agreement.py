"""Keepers of several nodes agree on the step they write; by themselves, and after crashes of real runs."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from holdfast.checkpoint.folder import checkpoints_in, shared_temporary
from holdfast.checkpoint.manifest import read_manifest
from holdfast.snapshot.keeper import checkpoint_writer, save_queue
from holdfast.snapshot.keeper.agreement import StepAgreement
from holdfast.snapshot.memory.ready_slot import common_steps, find_ready
from holdfast.snapshot.memory.run_memory import opened_arenas, write_json
from holdfast.snapshot.ranks.status_page import FINISHED
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import Journal
from tests.snapshot.harness import Fault, keeper_process, launch, wait_for
from tests.snapshot.keeper.test_replication import pair, places, stop_everything  # noqa: F401
from tests.snapshot.keeper.test_service import hash_on_disk


def nodes(folder, count):
    names = [f"host-{node}" for node in range(count)]
    members = [StepAgreement(folder, name) for name in names]
    for member in members:
        member.nodes = names
    return members


@pytest.mark.parametrize("seed", range(20))
def test_all_get_the_newest_step_that_all_hold_in_whatever_order_they_come(tmp_path, seed):
    chance = random.Random(seed)
    members = nodes(tmp_path, chance.randrange(2, 6))
    for _ in range(3):  # one agreement after another, in the same folder
        newest = chance.randrange(2, 100)
        held = [[newest - behind, newest - behind - 1] for behind in (chance.choice([0, 1]) for _ in members)]
        expected = max(set.intersection(*map(set, held)))
        proposals = [chance.randbytes(8).hex() for _ in members]
        answers = [None] * len(members)
        while None in answers:
            node = chance.randrange(len(members))
            answers[node] = members[node].agree(proposals[node], held[node])
            assert answers[node] in (None, expected)
        assert not any(member.undecided() for member in members)
    members[0].close()
    assert not list(tmp_path.iterdir())


def test_a_decision_answers_only_the_proposals_that_it_is_made_from(tmp_path):
    first, second = nodes(tmp_path, 2)
    assert first.agree("a", [7, 6]) is None and second.undecided() == {"a"}
    assert second.agree("b", [6, 5]) is None
    assert first.agree("a", [7, 6]) == 6 == second.agree("b", [6, 5])
    assert second.agree("c", [6, 5]) is None and first.undecided() == {"c"}
    assert first.agree("a", [7, 6]) == 6, "its own proposal was decided"
    assert second.agree("c", [6, 5]) is None
    assert first.agree("d", [7, 6]) == 6 == second.agree("c", [6, 5])


def test_the_proposal_of_a_killed_keeper_is_used_at_most_once(tmp_path):
    first, second = nodes(tmp_path, 2)
    second.agree("before it was killed", [3])
    assert first.agree("a", [9, 3]) == 3
    assert first.agree("b", [9, 8]) is None
    second.agree("the one that followed it", [9, 8])
    assert first.agree("b", [9, 8]) == 9


def test_a_withdrawn_proposal_does_not_count(tmp_path):
    first, second = nodes(tmp_path, 2)
    second.agree("b", [5])
    second.withdraw("b")
    assert first.agree("a", [5]) is None and not first.undecided()
    second.agree("c", [5])
    assert first.agree("a", [5]) == 5
    second.withdraw("c")
    assert second.agree("c", [5]) == 5, "a decision is not withdrawn"


@pytest.mark.distributed
@pytest.mark.parametrize("node", [0, 1])
def test_persist_on_any_node_of_a_run_that_goes_on_writes_all_of_a_step(pair, oracle, node):  # noqa: F811
    pair.steps = 400
    launched = launch(pair)
    wait_for(lambda: all(run_memory.pages().get(rank) for rank, run_memory in enumerate(places(pair))), "the ranks")
    wait_for(lambda: places(pair)[1].pages()[1]["step"] >= 3, "the run to train")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holdfast",
            "persist",
            str(pair.folder),
            "--snapshot-dir",
            str(pair.memory / f"node{node}"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (step, path), *others = checkpoints_in(pair.folder)
    assert done.stdout.strip() == str(path) and not others
    assert all(rank["random"] for rank in read_manifest(path).per_rank)
    assert hash_on_disk(pair, step) == oracle(pair)[step]
    launched.kill()
    launched.wait(pair)


@pytest.mark.distributed
def test_nodes_that_hold_different_newest_steps_write_the_one_that_both_hold(pair, oracle):  # noqa: F811
    """Rank 1 is killed while it copies step 5; rank 0 has it. Neither node holds the whole state."""
    pair.slow_copy = {1: 1.0}
    pair.faults = [Fault("kill while writing", rank=1, step=5, point="taken")]
    launched = launch(pair)
    assert not launched.wait(pair)
    wait_for(lambda: checkpoints_in(pair.folder), f"a checkpoint: {pair.events()}")
    ((step, path),) = checkpoints_in(pair.folder)
    assert step == 4 and hash_on_disk(pair, step) == oracle(pair)[step]
    assert all(rank["random"] for rank in read_manifest(path).per_rank)
    for run_memory in places(pair):
        os.kill(keeper_process(run_memory), signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_a_state_cut_over_two_nodes_is_written_by_both_after_a_crash_and_comes_back(pair, check, layout):  # noqa: F811
    pair.layout, pair.options, pair.steps = layout, {}, 12
    pair.faults = [Fault("kill", rank=1, step=5, point="forward")]
    assert check(pair, between=lambda _: wait_for(lambda: checkpoints_in(pair.folder), "a checkpoint")) == 1
    assert checkpoints_in(pair.folder)[0][0] in (4, 5)


@pytest.fixture
def halves(pair):  # noqa: F811
    """The memory of a run whose two nodes hold half of the state each, after a power cut; and the newest step of both."""
    launched = launch(pair)
    wait_for(lambda: all(run_memory.arenas() for run_memory in places(pair)), "the nodes' memory")
    wait_for(lambda: places(pair)[1].pages()[1]["ready"] >= 3, "the run to train")
    stop_everything(pair, launched)
    with contextlib.ExitStack() as stack:
        arenas = [stack.enter_context(opened_arenas(one.arenas(), one.key)) for one in places(pair)]
        yield arenas, max(set.intersection(*(set(common_steps(half)) for half in arenas)))


@pytest.mark.distributed
@pytest.mark.parametrize("slow", [0, 1])
def test_a_node_with_a_slow_disk_is_waited_for_as_long_as_it_writes(pair, oracle, halves, monkeypatch, slow):  # noqa: F811
    arenas, step = halves
    write_shard = checkpoint_writer._write_shard

    def write_slowly(folder, held):
        time.sleep(4.0 if held.arena.rank == slow else 0.0)
        return write_shard(folder, held)

    monkeypatch.setattr(checkpoint_writer, "_write_shard", write_slowly)
    monkeypatch.setattr(checkpoint_writer, "HEARTBEAT_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as pool:
        checkpoints = pair.folder / "checkpoints"
        writes = [
            pool.submit(checkpoint_writer.write_checkpoint, half, step, checkpoints, wait_seconds=1.5)
            for half in arenas
        ]
        assert len({write.result() for write in writes}) == 1
    assert hash_on_disk(pair, step) == oracle(pair)[step]
    assert files_in(checkpoints) == ONE_CHECKPOINT


ONE_CHECKPOINT = {"latest", "MANIFEST.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}


def files_in(checkpoints):
    return {path.name for path in checkpoints.rglob("*") if path.is_file()}


@pytest.mark.distributed
def test_what_a_killed_keeper_left_in_the_shared_folder_does_not_get_into_the_checkpoint(pair, halves):  # noqa: F811
    arenas, step = halves
    checkpoints = pair.folder / "checkpoints"
    shared = shared_temporary(checkpoints, step, find_ready(arenas[0][0], step).small["token"])
    shared.mkdir(parents=True)
    for name in ("entry", "heartbeat"):
        (shared / f".rank-00001.{name}.json.4000000-0a1b2c3d.tmp").write_bytes(b"{")
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(write_until_done, half, step, checkpoints) for half in arenas]
        assert len({write.result() for write in writes}) == 1
    assert files_in(checkpoints) == ONE_CHECKPOINT


@pytest.mark.distributed
def test_a_node_whose_ranks_have_finished_makes_no_proposal(pair, halves):  # noqa: F811
    """The first node, which removes the folder of the proposals, may have ended: a request that a crash left is dropped."""
    node = places(pair)[1]
    queue = save_queue.SaveQueue(node, Journal(pair.folder / "events.jsonl"), print)
    queue.agreement.nodes = [place.node for place in places(pair)]
    queue.pages = {1: node.pages()[1]}
    queue.pages[1]["status"] = FINISHED
    queue.add("died")
    queue.work()
    assert not (pair.folder / "checkpoints").exists()
    queue.drop_after_end()
    assert not queue


@pytest.mark.distributed
@pytest.mark.parametrize("reason", ["save", "died"])
def test_a_keeper_killed_before_latest_was_written_is_made_up_for(pair, halves, reason):  # noqa: F811
    arenas, step = halves
    checkpoints = pair.folder / "checkpoints"
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(write_until_done, half, step, checkpoints) for half in arenas]
        assert len({write.result() for write in writes}) == 1
    token = find_ready(arenas[0][0], step).small["token"]
    (checkpoints / "latest").unlink()
    (checkpoints / ".latest.4000000-0a1b2c3d.tmp").write_bytes(b"step")
    shared_temporary(checkpoints, step, token).mkdir()  # an older checkpoint of the step, which was exchanged
    queue = save_queue.SaveQueue(places(pair)[0], Journal(pair.folder / "events.jsonl"), print)
    queue.agreement.nodes = [place.node for place in places(pair)]
    request = queue.add(reason)
    request.damaged = [newer for newer in common_steps(arenas[0]) if newer > step]  # which the other node does not hold
    if reason == "save":
        request.step, request.token = step, token
    queue.work()
    assert not queue and files_in(checkpoints) == ONE_CHECKPOINT and not list(checkpoints.glob(".step-*"))
    assert (checkpoints / "latest").read_text() == f"step-{step:08d}\n"


def write_until_done(half, step, checkpoints):
    for _ in range(3):
        with contextlib.suppress(HoldfastError):
            return checkpoint_writer.write_checkpoint(half, step, checkpoints, wait_seconds=20.0)
    return None


@pytest.mark.distributed
def test_a_checkpoint_is_not_published_without_the_shard_of_another_node(pair, oracle, halves, monkeypatch):  # noqa: F811
    """The keeper of rank 0 failed and removed the folder while the other node wrote: its entry comes without its shard."""
    arenas, step = halves
    write_shard, removed = checkpoint_writer._write_shard, []

    def write_and_lose_once(folder, held):
        file = write_shard(folder, held)
        if held.arena.rank == 1 and not removed:
            removed.append(file)
            (folder / file.name).unlink()
        return file

    monkeypatch.setattr(checkpoint_writer, "_write_shard", write_and_lose_once)
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(write_until_done, half, step, pair.folder / "checkpoints") for half in arenas]
        assert len({write.result() for write in writes}) == 1
    assert removed and hash_on_disk(pair, step) == oracle(pair)[step]


@pytest.mark.distributed
def test_nodes_write_again_together_after_the_disk_of_the_first_one_failed(pair, oracle, halves, monkeypatch):  # noqa: F811
    """The keeper of rank 0 fails once and removes what both wrote: the other one writes its part again."""
    arenas, step = halves
    publish_step, failures = checkpoint_writer.publish_step, [OSError(28, "injected: no space left on device")]

    def fail_once(*paths):
        if failures:
            raise failures.pop()
        publish_step(*paths)

    monkeypatch.setattr(checkpoint_writer, "publish_step", fail_once)
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(write_until_done, half, step, pair.folder / "checkpoints") for half in arenas]
        assert len({write.result() for write in writes}) == 1
    assert not failures and hash_on_disk(pair, step) == oracle(pair)[step]


@pytest.mark.distributed
def test_a_save_that_one_node_alone_was_asked_for_is_dropped_after_a_newer_one(pair, halves, monkeypatch):  # noqa: F811
    """The ranks of the other node were killed before they wrote their request: it never writes its part of that step."""
    arenas, newest = halves
    monkeypatch.setattr(save_queue, "PEER_WRITE_SECONDS", 0.2)
    monkeypatch.setattr(save_queue, "RETRY_SECONDS", 0.0)
    node = places(pair)[1]
    queue = save_queue.SaveQueue(node, Journal(pair.folder / "events.jsonl"), print)
    queue.agreement.nodes = [place.node for place in places(pair)]
    older = min(set.intersection(*(set(common_steps(half)) for half in arenas)))
    assert older < newest
    for step in (older, newest):
        token = find_ready(arenas[1][0], step).small["token"]
        write_json(node.requests / f"{step}.json", {"kind": "save", "step": step, "token": token})
    queue.read()
    queue.work()
    assert queue, "both are tried again"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(
            checkpoint_writer.write_checkpoint, arenas[0], newest, pair.folder / "checkpoints", wait_seconds=20.0
        )
        wait_for(lambda: queue.work() or other.done(), "the newer step")
    assert other.result().name == f"step-{newest:08d}"
    wait_for(lambda: queue.work() or not queue, "the older request to be dropped", 20)
    assert not list(node.requests.iterdir())


@pytest.mark.distributed
@pytest.mark.parametrize("alone", [0, 1])
def test_a_node_that_does_not_come_is_not_waited_for_for_ever(pair, halves, alone):  # noqa: F811
    arenas, step = halves
    with pytest.raises(HoldfastError, match="within"):
        checkpoint_writer.write_checkpoint(arenas[alone], step, pair.folder / "checkpoints", wait_seconds=0.5)
    assert not list((pair.folder / "checkpoints").iterdir())


@pytest.mark.distributed
@pytest.mark.parametrize("alone", [0, 1])
def test_a_node_that_holds_everything_and_is_left_alone_does_not_wait_again(pair, oracle, alone):  # noqa: F811
    """The other node is gone, its keeper and its memory with it, and the scheduler ends this one."""
    pair.options = {}
    launched = launch(pair)
    wait_for(lambda: all(run_memory.arenas() for run_memory in places(pair)), "the nodes' memory")
    wait_for(lambda: places(pair)[alone].pages()[alone]["ready"] >= 3, "the run to train")
    left, gone = places(pair)[alone], places(pair)[1 - alone]
    os.kill(keeper_process(gone), signal.SIGKILL)
    launched.kill()
    launched.wait(pair)
    shutil.rmtree(gone.path)
    keeper = keeper_process(left)
    os.kill(keeper, signal.SIGTERM)
    wait_for(lambda: checkpoints_in(pair.folder), "a checkpoint")
    ((step, _),) = checkpoints_in(pair.folder)
    assert hash_on_disk(pair, step) == oracle(pair)[step]
    wait_for(lambda: not psutil.pid_exists(keeper), "the keeper to leave")

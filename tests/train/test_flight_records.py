"""Flight records of a collective that waits: real ones of gloo ranks, and files that are damaged or forged."""

import os
import pickle
from datetime import timedelta
from pathlib import Path

import orjson
import pytest
import torch
import torch.distributed as dist

from holdfast.train.flight_records import (
    describe_records,
    ranks_text,
    read_records,
    record_environment,
    remove_if_empty,
    write_record,
)
from tests.gloo import spawn_ranks

LATE, WORLD = 2, 3


def wait_for_a_rank(folder: Path) -> bytes:
    """One rank leaves out the second all-reduce of a group; the others write their records when it times out."""
    os.environ.update(record_environment(folder))
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))]
    dist.new_group([LATE])  # torch knows the ranks of a group that this rank is not in, but not its name
    numbers = torch.ones(4)
    dist.barrier()
    dist.all_reduce(numbers, group=groups[1])
    if rank != LATE:
        dist.all_reduce(numbers, group=groups[0])  # a group without the late rank
        with pytest.raises(RuntimeError, match="imed out"):
            dist.all_reduce(numbers, group=groups[1])
        write_record(rank, [other for other in range(WORLD) if other != LATE], seconds=60)
    dist.barrier()  # the late rank keeps its connections until then
    return torch._C._distributed_c10d._dump_fr_trace()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_rank_that_did_not_arrive_is_named(tmp_path):
    folder = tmp_path / "flight" / "1-0"
    pickled = spawn_ranks(WORLD, wait_for_a_rank, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    expected = {"flight_record": "flight/1-0", "collective": "gloo:all_reduce", "missing_ranks": [LATE]}
    assert describe_records(folder, tmp_path, range(WORLD)) == expected
    # of another node's rank this folder knows nothing
    assert "missing_ranks" not in describe_records(folder, tmp_path, [0, 1])
    # torch's own pickles have the same content, without the ranks of a group
    for rank, content in enumerate(pickled[:LATE]):
        (folder / f"rank_{rank}").write_bytes(content)
    assert [rank for rank, _ in read_records(folder)] == [0, 1]
    assert all(len(record["entries"]) >= 3 for _, record in read_records(folder))


def test_a_record_is_data_and_damaged_ones_are_left_out(tmp_path):
    marker = tmp_path / "executed"

    class Forged:
        def __reduce__(self):
            return Path.touch, (marker,)

    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [Forged()]}))
    (tmp_path / "rank_1").write_bytes(b'{"entries": [1, {"process_group": 3}, {"process_group": ["0"]}]')
    (tmp_path / "rank_2").write_bytes(orjson.dumps({"entries": [1, {"process_group": 3}], "pg_config": []}))
    (tmp_path / "rank_x").write_bytes(b"{}")
    assert [rank for rank, _ in read_records(tmp_path)] == [2] and not marker.exists()
    assert describe_records(tmp_path, tmp_path, range(3)) == {"flight_record": "."}


def test_the_environment_names_the_folder_and_keeps_what_the_user_set(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "17")
    folder = tmp_path / "flight" / "1-0"
    found = record_environment(folder)
    assert found["TORCH_FR_BUFFER_SIZE"] == "17" and found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == found["TORCH_FR_DUMP_TEMP_FILE"] == str(folder / "rank_")
    assert folder.is_dir()
    remove_if_empty(folder)
    assert not (tmp_path / "flight").exists()
    assert (ranks_text([3]), ranks_text([1, 4])) == ("rank 3", "ranks 1, 4")

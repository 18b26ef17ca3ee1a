"""Checkpoints across layouts: what one layout saved, any other loads, to the bit; torch's own reader agrees."""

import os
import shutil

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load

from holdfast.checkpoint import State, load, load_newest, newest, open_checkpoint, read_manifest, save
from holdfast.checkpoint.folder import LATEST, checkpoints_in, latest_name
from holdfast.system.errors import HoldfastError
from tests.checkpoint.layouts import Model, assert_filled, build, expected, fill, take_a_step
from tests.checkpoint.worlds import run_world
from tests.disks import small_disk
from tests.grids import mostly_slow


def save_in(rank, layout, folder, seed=1, step=7, rows=13):
    state = build(layout, rows)
    take_a_step(state)
    fill(state, seed)
    state.optimizers[0].param_groups[0]["lr"] = 0.125
    state.shared = {"iteration": step}
    state.per_rank = {"mine": rank}
    return save(folder, step, state)


def load_in(rank, layout, path, seed=1, rows=13, zero_from=None):
    state = build(layout, rows)
    shared = load(path, state)
    assert shared == {"iteration": 7, "step": 7}
    assert_filled(state, seed, zero_from)
    groups = state.optimizers[0].param_groups
    assert [group["lr"] for group in groups] == [0.125, 0.5]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert isinstance(groups[0]["betas"], tuple)
    return state.per_rank


CROSSINGS = [
    ("ddp", 3, "fsdp", 2),
    ("fsdp", 3, "single", 1),
    ("tp", 4, "pp", 4),
    ("pp", 4, "tp+fsdp", 4),
    ("tp+fsdp", 4, "ddp", 2),
    ("fsdp", 4, "tp", 2),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "ranks_before", "after", "ranks_after"), mostly_slow(CROSSINGS, CROSSINGS[3:5]))
def test_what_one_layout_saved_another_loads_bit_for_bit(tmp_path, before, ranks_before, after, ranks_after):
    (path, *_) = run_world(ranks_before, save_in, before, tmp_path)
    per_rank = run_world(ranks_after, load_in, after, path)
    assert per_rank == [{"mine": r} if ranks_before == ranks_after else {} for r in range(ranks_after)]
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        assert checkpoint.tensors["model.embedding.weight"] == ("F32", (13, 6))
        assert "model.head.weight" not in checkpoint.tensors, "the tied head is stored once, as the embedding"


@pytest.mark.distributed
def test_every_element_is_written_once_and_evenly(tmp_path):
    run_world(4, save_in, "pp", tmp_path)
    manifest = read_manifest(newest(tmp_path))
    elements = dict.fromkeys(manifest.tensors, 0)
    for file in manifest.files:
        for name, _, _, shape in file.pieces:
            elements[name] += torch.Size(shape).numel()
    assert elements == {name: torch.Size(shape).numel() for name, (_, shape) in manifest.tensors.items()}
    sizes = [file.bytes for file in manifest.files]
    assert len(sizes) == 4 and max(sizes) < 1.2 * min(sizes)


@pytest.mark.distributed
def test_torchs_own_reader_gets_the_same_bytes(tmp_path):
    (path, *_) = run_world(3, save_in, "fsdp", tmp_path)
    state = build("single")
    wanted = {item.name: expected(item, 1) for item in state.items(optimizer=False)}
    found = {name: torch.full_like(tensor, 77) for name, tensor in wanted.items()}
    dcp_load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert len(wanted) > 20
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.distributed
@pytest.mark.parametrize(("rows_before", "rows_after"), [(16, 14), (14, 16)])
def test_padding_of_the_vocabulary_may_change(tmp_path, rows_before, rows_after):
    (path, *_) = run_world(2, save_in, "fsdp", tmp_path, 1, 7, rows_before)
    load_in(0, "single", path, 1, rows_after, zero_from=13)


def test_a_continued_run_is_bit_identical(tmp_path):
    def train(state, steps):
        for _ in range(steps):
            state.optimizers[0].zero_grad()
            state.models[0](torch.arange(13)).square().mean().backward()
            state.optimizers[0].step()

    straight, first = build("single"), build("single")
    train(straight, 6)
    train(first, 3)
    path = save(tmp_path, 3, first)
    second = build("single")
    load(path, second)
    train(second, 3)
    for one, other in zip(straight.items(), second.items(), strict=True):
        assert torch.equal(one.local, other.local), one.name


def test_wrappers_leave_no_trace_in_names():
    names = set(State(Model()).parameters)
    compiled = torch.compile(Model())
    compiled.blocks["1"] = torch.compile(compiled.blocks["1"])
    assert set(State(torch.nn.DataParallel(compiled)).parameters) == names


def test_dtypes_and_odd_shapes_come_back(tmp_path):
    module = torch.nn.Module()
    wanted = {}
    for number, dtype in enumerate(
        [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]
    ):
        for shape in [(), (1,), (3, 5), (0, 4), (2, 1, 3)]:
            name = f"b{number}_{len(shape)}_{sum(shape)}"
            wanted[name] = (torch.randn(shape) * 10).to(dtype)
            module.register_buffer(name, wanted[name].clone())
    path = save(tmp_path, 1, State(module))
    for buffer in module.buffers():
        buffer.zero_()
    load(path, State(module))
    for name, tensor in wanted.items():
        found = module.get_buffer(name)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_rows_are_read_alone(tmp_path):
    state = build("single")
    fill(state, 3)
    with open_checkpoint(save(tmp_path, 1, state)) as checkpoint:
        whole = checkpoint.tensor("model.embedding.weight")
        assert (checkpoint.tensor("model.embedding.weight", rows=(4, 9)) == whole[4:9]).all()


def flip(path):
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def flip_header(path):
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, os.path.getsize(path) - 1)


def swap(path):
    other = path.with_name(path.name.replace("00000-of", "00001-of"))
    content = path.read_bytes(), other.read_bytes()
    path.write_bytes(content[1])
    other.write_bytes(content[0])


def break_manifest(path):
    manifest = path.with_name("MANIFEST.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'"world": 2', b'"world": 3'))


def tear_folder(path):
    path.with_name("MANIFEST.json").unlink()


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_world(2, save_in, "ddp", folder, 1, 7)
    run_world(2, save_in, "ddp", folder, 2, 8)
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("damage", [flip, flip_header, truncate, swap, os.unlink, break_manifest, tear_folder])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(two_checkpoints, tmp_path, damage, capsys):
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-00000008" / "shard-00000-of-00002.safetensors")
    state = build("single")
    path, shared = load_newest(tmp_path, state)
    assert path.name == "step-00000007" and shared["step"] == 7
    assert_filled(state, 1)
    named = capsys.readouterr().err
    assert "step-00000008" in named and ("shard-" in named or "MANIFEST.json" in named)


@pytest.mark.distributed
def test_all_ranks_fall_back_when_one_of_them_finds_the_damage(tmp_path):
    run_world(2, save_in, "fsdp", tmp_path, 1, 7)
    run_world(2, save_in, "fsdp", tmp_path, 2, 8)
    flip(tmp_path / "step-00000008" / "shard-00001-of-00002.safetensors")
    assert run_world(2, newest_step_in, "fsdp", tmp_path) == [7, 7]


def newest_step_in(rank, layout, folder):
    state = build(layout)
    _, shared = load_newest(folder, state)
    assert_filled(state, 1)
    return shared["step"]


def test_only_damaged_checkpoints_are_an_error_and_none_is_a_fresh_start(tmp_path):
    state = build("single")
    assert load_newest(tmp_path, state) is None
    flip(save(tmp_path, 1, state) / "shard-00000-of-00001.safetensors")
    with pytest.raises(HoldfastError, match="shard-00000-of-00001"):
        load_newest(tmp_path, state)


def test_another_model_is_refused_and_the_tensor_named(tmp_path):
    path = save(tmp_path, 1, State(Model()))
    with pytest.raises(HoldfastError, match=r"model.blocks.4.norm.weight"):
        load(path, State(Model(range(5))))
    with pytest.raises(HoldfastError, match=r"model.blocks.3.*and 3 more"):
        load(path, State(Model(range(3))))
    with pytest.raises(HoldfastError, match=r"embedding.weight has shape \[13, 6\].*\[15, 6\]"):
        load(path, State(Model(rows=15)))
    with pytest.raises(HoldfastError, match=r"F32 in .* but F64"):
        load(path, State(Model().double()))


def test_weights_alone_may_change_their_dtype_and_leave_the_optimizer_alone(tmp_path):
    state = build("single")
    take_a_step(state)
    fill(state, 1)
    path = save(tmp_path, 1, state)
    half = State(Model().bfloat16())
    load(path, half, weights_only=True)
    assert torch.equal(half.parameters["embedding.weight"], state.parameters["embedding.weight"].bfloat16())
    fresh = build("single")
    load(path, fresh, optimizer=False)
    assert fresh.optimizers[0].state == {}


def test_retention_keeps_the_last_and_every_hundredth(tmp_path):
    state = build("single")
    for step in range(50, 400, 50):
        save(tmp_path, step, state, keep_last=2, keep_every=100)
    assert [step for step, _ in checkpoints_in(tmp_path)] == [100, 200, 300, 350]
    assert (tmp_path / "latest").read_text() == "step-00000350\n"
    assert newest(tmp_path) == tmp_path / "step-00000350"


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    state = build("single")
    fill(state, 1)
    save(tmp_path, 5, state)
    fill(state, 2)
    path = save(tmp_path, 5, state)
    fresh = build("single")
    load(path, fresh)
    assert_filled(fresh, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000005"]


def errors_in(rank, folder):
    try:
        save(folder, 7, build("ddp"))
    except HoldfastError as error:
        return str(error)
    return None


@pytest.mark.distributed
def test_all_ranks_raise_the_same_error_when_latest_finds_no_room(tmp_path):
    # mount point, temporary folder, two shards, manifest: `latest` is one too many
    with small_disk(tmp_path / "disk", "4m,nr_inodes=5") as disk:
        errors = run_world(2, errors_in, disk, timeout=20)
    assert len(set(errors)) == 1 and "no room left on the disk" in errors[0]


@pytest.mark.distributed
def test_all_ranks_raise_the_same_error_when_the_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    errors = run_world(2, errors_in, tmp_path / "file" / "checkpoints", timeout=20)
    assert len(set(errors)) == 1 and "is not a folder" in errors[0]


def test_reading_a_checkpoint_needs_no_torch(tmp_path):
    import subprocess
    import sys

    path = save(tmp_path, 1, build("single"))
    program = (
        "import sys; from holdfast.checkpoint import open_checkpoint, newest, read_manifest\n"
        f"print(open_checkpoint({str(path)!r}).tensor('model.embedding.weight').shape, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert answer == "(13, 6) False\n"


def test_a_damaged_latest_names_no_checkpoint(tmp_path):
    (tmp_path / LATEST).write_bytes(b"step-\xff\n")
    named = latest_name(tmp_path)
    assert named is not None and not (tmp_path / named).exists()

"""Hostile sizes: whatever a file declares, reading it takes at most 512 MB and 10 seconds and ends with one line."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests.conversion.files.test_hostile import MEMBER, PROGRAM, torch_zip

SECONDS = 10
MEGABYTES = 512
CONFIG = {
    "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 4, "vocab_size": 10, "n_inner": 8,
}  # fmt: skip


def refuse(source: Path, *flags: str) -> str:
    """Runs the program on a hostile source; gives its one line. Seconds are of its own CPU time: others share the machine."""
    target = source.with_name(f"{source.name}-out")
    program = PROGRAM.replace("sys.argv[-1]", repr(str(target)))
    command = [sys.executable, "-c", program, "convert", str(source), str(target), *flags]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    after = os.times()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    peak = int(Path(f"{target}.peak").read_text()) / 1024
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert peak < MEGABYTES and seconds < SECONDS, (peak, seconds, done.stderr)
    assert not target.exists() and not list(source.parent.glob(".*.tmp"))
    return done.stderr


def hugging_face(folder: Path, config: bytes | None = None, weights: bytes | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes(json.dumps(CONFIG).encode() if config is None else config)
    (folder / "model.safetensors").write_bytes(safetensors(b"{}") if weights is None else weights)
    return folder


def safetensors(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


def empties(megabytes: int) -> bytes:
    return b'{"a":[' + b"[]," * (megabytes * (1 << 20) // 3) + b"[]]}"


def test_a_config_of_empty_lists(tmp_path):
    assert "config.json" in refuse(hugging_face(tmp_path / "hf", empties(60)))
    assert "config.json" in refuse(hugging_face(tmp_path / "small", empties(4)))


def test_a_safetensors_header_of_empty_lists(tmp_path):
    assert "model.safetensors" in refuse(hugging_face(tmp_path / "hf", weights=safetensors(empties(60))))
    assert "model.safetensors" in refuse(hugging_face(tmp_path / "small", weights=safetensors(empties(15))))


def test_a_safetensors_header_of_a_million_tensors(tmp_path):
    entry = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    for count in (60_000, 1_000_000):
        header = "{" + ",".join(entry.format(number) for number in range(count)) + "}"
        refuse(hugging_face(tmp_path / str(count), weights=safetensors(header.encode())))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.json", "model.safetensors.index.json"])
def test_a_sparse_file_of_3_gb(tmp_path, name):
    folder = hugging_face(tmp_path / "hf", weights=one_layer())
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    if name == "vocab.json":
        (folder / "merges.txt").write_text("a b\n")
    sparse(folder / name, 3 << 30)
    assert name in refuse(folder)


def one_layer() -> bytes:
    """The weights of CONFIG, all zero."""
    shapes = {"wte.weight": [10, 8], "wpe.weight": [4, 8], "ln_f.weight": [8], "ln_f.bias": [8]}
    for name, rows, columns in (
        ("attn.c_attn", 8, 24), ("attn.c_proj", 8, 8), ("mlp.c_fc", 8, 8), ("mlp.c_proj", 8, 8),
    ):  # fmt: skip
        shapes |= {f"h.0.{name}.weight": [rows, columns], f"h.0.{name}.bias": [columns]}
    shapes |= {f"h.0.ln_{n}.{kind}": [8] for n in (1, 2) for kind in ("weight", "bias")}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[f"transformer.{name}"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return safetensors(json.dumps(header).encode(), bytes(at))


def test_a_manifest_of_empty_lists(tmp_path):
    folder = tmp_path / "run/checkpoints/step-00000001"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_bytes(empties(60))
    assert "MANIFEST.json" in refuse(tmp_path / "run")
    sparse(folder / "MANIFEST.json", 3 << 30)
    assert "MANIFEST.json" in refuse(tmp_path / "run")


def test_a_run_with_hostile_files_beside_its_checkpoint(tmp_path):
    from tests.conversion.holdfast_runs import GPT2_TINY, build_gpt, write_run

    run = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    (run / "tokenizer").mkdir()
    sparse(run / "tokenizer/recipe.json", 3 << 30)
    assert "recipe.json" in refuse(run)
    (run / "tokenizer/recipe.json").unlink()
    os.mkfifo(run / "tokenizer/recipe.json")
    assert "not a regular file" in refuse(run)


def deflated_zip(size: int, declared: int, padding: int = 0) -> bytes:
    """A member of `size` zero bytes that declares another size; `padding` makes its ratio look harmless."""
    squeeze, block, crc = zlib.compressobj(9, zlib.DEFLATED, -15), bytes(64 << 20), 0
    packed = squeeze.compress(block) + squeeze.flush(zlib.Z_FULL_FLUSH)
    for _ in range(size // len(block)):
        crc = zlib.crc32(block, crc)
    raw = packed * (size // len(block)) + zlib.compressobj(9, zlib.DEFLATED, -15).flush() + bytes(padding)
    name, sizes = MEMBER.encode(), (crc, len(raw), declared)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 33, *sizes, len(name), 0) + name + raw
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 33, *sizes, len(name), 0, 0, 0, 0, 0, 0) + name
    return local + entry + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local), 0)


@pytest.mark.parametrize(
    ("declared", "padding"), [(1 << 30, 0), (16 << 20, 0), (1 << 30, 52 << 20)], ids=["honest", "small", "padded"]
)
def test_a_zip_that_bursts(tmp_path, declared, padding):
    (tmp_path / "a.zip").write_bytes(deflated_zip(1 << 30, declared, padding))
    assert "a.zip" in refuse(tmp_path / "a.zip")


def test_a_zip_of_many_members(tmp_path):
    start = b"PK\3\4" + bytes(26)
    entries = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0) + b"%06d" % number
        for number in range(300_000)
    )
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 300_000, 300_000, len(entries), len(start))
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(start) + len(entries), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, len(entries), len(start), 0)
    (tmp_path / "a.zip").write_bytes(start + entries + record + locator + end)
    assert "a.zip" in refuse(tmp_path / "a.zip")


def lists(opcodes: int) -> bytes:
    return b"\x80\x04" + b"]\x94" * (opcodes // 2) + b"."


def nested(opcodes: int) -> bytes:
    return b"\x80\x04" + b")\x85" * (opcodes // 2) + b"."


@pytest.mark.parametrize("shape", [pytest.param(lists, marks=pytest.mark.slow), nested])
def test_rank_files_of_millions_of_opcodes_each(tmp_path, shape):
    run = tmp_path / "run"
    for rank in range(8):
        folder = run / f"iter_0000001/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        (folder / "model_optim_rng.pt").write_bytes(torch_zip(shape(2_900_000)))
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    assert "opcodes" in refuse(run)


def test_chunks_of_a_distributed_checkpoint_share_one_limit(tmp_path):
    import torch
    from torch.distributed import checkpoint

    from holdfast.conversion.megatron.torch_dist import DistributedCheckpoint
    from holdfast.system.errors import HoldfastError

    checkpoint.save({f"t{n}": torch.ones(4) for n in range(8)}, checkpoint_id=tmp_path, no_dist=True)
    reader = DistributedCheckpoint(tmp_path)
    before = reader.budget.opcodes
    reader.tensor("t0")
    each = before - reader.budget.opcodes
    reader.tensor("t0")
    assert each > 0 and reader.budget.opcodes == before - each  # read once, however often it is asked for
    reader.budget.opcodes = 3 * each
    with pytest.raises(HoldfastError, match="opcodes"):
        for number in range(1, 8):
            reader.tensor(f"t{number}")


def test_chunks_that_all_tensors_share_are_counted_for_each(tmp_path):
    import pickle

    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

    from holdfast.conversion.megatron.torch_dist import DistributedCheckpoint
    from holdfast.system.errors import HoldfastError

    size = torch.Size([1])
    chunks = [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=size)] * 1000
    entries = {f"t{n}": TensorStorageMetadata(properties=None, size=size, chunks=chunks) for n in range(1000)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places(entries))))
    with pytest.raises(HoldfastError, match="chunks"):
        DistributedCheckpoint(tmp_path)


def places(entries):
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return {MetadataIndex(name, torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 1) for name in entries}


def test_a_fifo_is_refused(tmp_path):
    run = tmp_path / "run"
    folder = run / "iter_0000001/mp_rank_00"
    folder.mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    os.mkfifo(folder / "model_optim_rng.pt")
    assert "not a regular file" in refuse(run)
    step = tmp_path / "own/checkpoints/step-00000001"
    step.mkdir(parents=True)
    os.mkfifo(step / "MANIFEST.json")
    refuse(tmp_path / "own")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe")
    good = hugging_face(tmp_path / "hf", weights=one_layer())
    flags = ("--vocab-file", str(tmp_path / "pipe"), "--merge-file", str(tmp_path / "pipe"))
    refuse(good, *flags)


@pytest.mark.parametrize("odd", ['"x"', "-5", "1.5", "null", "[]", "9999999999", "true"])
def test_a_vocab_with_odd_ids(tmp_path, odd):
    folder = hugging_face(tmp_path / "hf", weights=one_layer())
    (folder / "vocab.json").write_text('{"a": 0, "b": ' + odd + "}")
    (folder / "merges.txt").write_text("a b\n")
    assert "vocab.json" in refuse(folder)


def test_many_heads_of_width_one(tmp_path):
    """Each head of an old checkpoint version is a part of its own."""
    import torch

    from tests.conversion.megatron_files import Spec, make_truth, write_megatron

    spec = Spec(layers=1, hidden=4, heads=2, ffn=4, positions=4, vocab=10)
    run = write_megatron(tmp_path / "run", spec, make_truth(spec, spec.padded(1)), 0)
    path = run / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    heads = 700_000
    state["args"].num_attention_heads = state["args"].kv_channels = heads
    stack = state["model"]["language_model"]["encoder"]
    stack["layers.0.self_attention.query_key_value.weight"] = torch.zeros(3 * heads, 4, dtype=torch.float16)
    torch.save(state, path)
    assert "num_attention_heads" in refuse(run)
    config = CONFIG | {"n_head": heads, "n_embd": heads}
    weights = safetensors(b"{}")
    refuse(hugging_face(tmp_path / "hf", json.dumps(config).encode(), weights))


def sparse_model(folder: Path) -> Path:
    """A GPT-2 of 600 MB of zeros that takes no room on the disk."""
    width, rows = 1024, 300_000
    config = CONFIG | {"n_embd": width, "n_head": 16, "n_inner": 8, "vocab_size": rows}
    hugging_face(folder, json.dumps(config).encode())
    shapes = {"wte.weight": [rows, width], "wpe.weight": [4, width], "ln_f.weight": [width], "ln_f.bias": [width]}
    for name, first, second in (
        ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width), ("mlp.c_fc", width, 8), ("mlp.c_proj", 8, width),
    ):  # fmt: skip
        shapes |= {f"h.0.{name}.weight": [first, second], f"h.0.{name}.bias": [second]}
    shapes |= {f"h.0.ln_{n}.{kind}": [width] for n in (1, 2) for kind in ("weight", "bias")}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[f"transformer.{name}"] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    start = safetensors(json.dumps(header).encode())
    sparse(folder / "model.safetensors", len(start) + at, start)
    return folder


@pytest.mark.slow
def test_verification_takes_the_memory_of_the_largest_matrix(tmp_path):
    """Not that of the model: 600 MB here, on either side."""
    folder, target = sparse_model(tmp_path / "hf"), tmp_path / "out"
    program = PROGRAM.replace("sys.argv[-1]", repr(str(target)))
    subprocess.run([sys.executable, "-c", program, "convert", str(folder), str(target), "--verify"], check=True)
    assert int(Path(f"{target}.peak").read_text()) / 1024 < 400


def test_sigterm_leaves_nothing(tmp_path):
    """The signal arrives while the program writes."""
    folder = sparse_model(tmp_path / "hf")
    command = [sys.executable, "-m", "holdfast.cli", "convert", str(folder), str(tmp_path / "out")]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".out.*.tmp")):
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.002)
    child.send_signal(signal.SIGTERM)
    _, printed = child.communicate(timeout=60)
    assert child.returncode not in (0, 1) and "Traceback" not in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]

"""Hostile files: none runs anything, none hangs, none takes more than 512 MB, all end with exit code 1 and one line."""

import io
import os
import pickle
import stat
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from holdfast import convert
from holdfast.conversion.files.budget import Budget
from holdfast.conversion.files.pickles import load_pickle
from holdfast.conversion.files.torch_reader import load_torch
from holdfast.conversion.files.zips import map_file, read_directory
from holdfast.conversion.sources import read_model
from holdfast.system.errors import HoldfastError
from tests.conversion.megatron_files import Spec, make_truth, write_megatron
from tests.grids import mostly_slow

MEMBER = "release/mp_rank_00/model_optim_rng.pt"


class Shell:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def tiny(folder, **options):
    spec = Spec(layers=1, hidden=8, heads=2, ffn=8, positions=4, vocab=10)
    run = write_megatron(folder, spec, make_truth(spec, spec.padded(1)), 3.0, **options)
    return run / "iter_0000100/mp_rank_00/model_optim_rng.pt"


def torch_zip(pickled: bytes, storages: dict[str, bytes] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def tensor_pickle(count=4, offset=0, shape=(2, 2), stride=(2, 1), kind=b"ctorch\nFloatStorage\n", key=b"0"):
    """{'model': {'language_model': {'word_embeddings': one tensor of our choosing}}} in opcodes."""

    def number(value):
        raw = value.to_bytes(16, "little", signed=True)
        return b"\x8a\x10" + raw

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value

    numbers = [b"(" + b"".join(map(number, values)) + b"t" for values in (shape, stride)]
    identity = b"(" + text(b"storage") + kind + text(key) + text(b"cpu") + number(count) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + identity + number(offset) + numbers[0] + numbers[1] + b"\x89)tR"
    names = b"}" + text(b"model") + b"}" + text(b"word_embeddings.weight") + tensor + b"ss."
    return b"\x80\x02" + names


def shell_zip(mark):
    out = io.BytesIO()
    torch.save({"model": Shell(mark), "args": Shell(mark)}, out)
    return out.getvalue()


def shell_legacy(mark):
    out = io.BytesIO()
    torch.save({"model": {"language_model": Shell(mark)}}, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def laughs(levels=80):
    """A tree of lists that is small in memory and endless to walk, print or compare."""
    twice = [b"q" + bytes([n]) + b"0](h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(levels)]
    return b"]" + b"".join(twice)


def reused(call: bytes, times: int, container: bytes = b"](%be") -> bytes:
    """A list of 300,000 elements (memo 0) and the name os.system (memo 1), which `call` uses again and again."""
    return b"\x80\x02" + container % (b"N" * 300_000) + b"q\x000cos\nsystem\nq\x010" + call * times + b"N."


def shared_dicts(levels: int = 8, keys: int = 200) -> bytes:
    """Dicts in dicts, each under many keys: a few thousand opcodes, and more names than anybody could count."""
    names = [b"X\x03\x00\x00\x00%03d" % number for number in range(keys)]
    whole = b"}"
    for level in range(levels):
        memo = b"q" + bytes([level])
        whole += memo + b"0}(" + b"".join(name + b"h" + bytes([level]) for name in names) + b"u"
    return whole


def rank_zip(*members, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def overlapping(content: bytes) -> bytes:
    """Two directory entries that point at the same bytes."""
    data = bytearray(rank_zip((MEMBER, content), ("release/mp_rank_01/model_optim_rng.pt", b"x" * len(content))))
    start = struct.unpack("<I", data[-6:-2])[0]
    second = data.index(b"PK\x01\x02", start + 4)
    data[second + 42 : second + 46] = data[start + 42 : start + 46]
    return bytes(data)


def symlink(content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(MEMBER, content)
        info = zipfile.ZipInfo("release/link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    return out.getvalue()


def renamed_inside(content: bytes) -> bytes:
    """Another name in the local header than in the directory."""
    data = rank_zip((MEMBER, content))
    return data.replace(MEMBER.encode(), MEMBER.replace("00", "77").encode(), 1)


def counting_none(content: bytes) -> bytes:
    """A directory of no members in front of its own end."""
    data = bytearray(rank_zip((MEMBER, content)))
    data[-14:-6] = b"\0" * 8
    return bytes(data)


def half_a_size(content: bytes) -> bytes:
    """The size is said to be in the extra field, as two numbers of which there are ten bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo(MEMBER)
        info.extra = struct.pack("<HH", 1, 16) + b"\0" * 10
        archive.writestr(info, content)
    data = bytearray(out.getvalue())
    start = struct.unpack("<I", data[-6:-2])[0]
    data[start + 20 : start + 28] = b"\xff" * 8
    return bytes(data)


def duplicated(content: bytes) -> bytes:
    with pytest.warns(UserWarning, match="Duplicate name"):
        return rank_zip((MEMBER, content), (MEMBER, content))


def truncated_length(content: bytes) -> bytes:
    return content[: len(content) // 2]


def hostile_files(mark: Path, good: bytes) -> dict[str, bytes]:
    mebi = 1 << 20
    return {
        "os.system in a zip": shell_zip(mark),
        "os.system in the legacy form": shell_legacy(mark),
        "os.system as the whole pickle": torch_zip(pickle.dumps(Shell(mark))),
        "a thousand calls in a row": torch_zip(
            b"\x80\x02" + b"cbuiltins\neval\nX\x04\x00\x00\x001+12\x85R" * 1000 + b"."
        ),
        "nested a million deep": torch_zip(b"\x80\x02" + b"]" * mebi + b"a" * (mebi - 1) + b"."),
        "tuples a million deep": torch_zip(b"\x80\x02)" + b"\x85" * mebi + b"."),
        "a deep tuple as a key": torch_zip(b"\x80\x02})" + b"\x85" * 150 + b"Ns."),
        "a memo of millions": torch_zip(b"\x80\x04" + b"]\x94" * (8 * mebi) + b"."),
        "marks without end": torch_zip(b"\x80\x02" + b"(" * (4 * mebi) + b"."),
        "an endless tree": torch_zip(b"\x80\x02}X\x05\x00\x00\x00model" + laughs() + b"s."),
        "endless args": torch_zip(
            b"\x80\x02}X\x05\x00\x00\x00modelN" + b"sX\x09\x00\x00\x00iteration" + laughs() + b"s."
        ),
        "a shape that is made ten thousand times": torch_zip(
            reused(b"h\x02h\x00\x85R", 10_000).replace(b"cos\nsystem\nq\x010", b"ctorch\nSize\nq\x020")
        ),
        "a shape of a text of 60 MB": torch_zip(
            b"\x80\x02ctorch\nSize\nX" + struct.pack("<I", 60 * mebi) + b"a" * (60 * mebi) + b"\x85R."
        ),
        "keywords for ten thousand objects": torch_zip(reused(b"h\x01h\x00}NNs\x92", 10_000, b"(%bt")),
        "ten thousand calls with endless arguments": torch_zip(reused(b"h\x01h\x00R0", 10_000, b"(%bt")),
        "a long key, ten thousand times": torch_zip(reused(b"}h\x00Ns0", 10_000, b"(%bt")),
        "a storage of an endless kind": torch_zip(tensor_pickle(kind=laughs()), {"0": b"\0" * 16}),
        "a tensor of endless shape": torch_zip(
            tensor_pickle(shape=()).replace(b"(t(", b"(" + laughs() + b"t("), {"0": b"\0" * 16}
        ),
        "names without end": torch_zip(b"\x80\x02}X\x05\x00\x00\x00model" + shared_dicts() + b"s."),
        "an endless name": torch_zip(b"\x80\x02}X\x05\x00\x00\x00model}cos\nsystem\n(" + laughs() + b"tR}ss."),
        "a string of exabytes": torch_zip(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x."),
        "bytes of exabytes": torch_zip(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x."),
        "a number of megabytes": torch_zip(b"\x80\x02\x8b" + struct.pack("<i", mebi) + b"\x7f" * mebi + b"."),
        "a number of many digits": torch_zip(b"\x80\x02I" + b"9" * 3000 + b"\n."),
        "a pickle of 100 MB": torch_zip(
            b"\x80\x02" + (b"X" + struct.pack("<I", mebi) + b"a" * mebi + b"0") * 100 + b"N."
        ),
        "a name with line breaks": torch_zip(
            tensor_pickle().replace(b"embeddings.weight", b"embe\n\x1b[2Js.weight"), {"0": b"\0" * 16}
        ),
        "the extension registry": torch_zip(b"\x80\x02\x82\x01."),
        "an instance by INST": torch_zip(b"(ios\nsystem\n."),
        "a text persistent id": torch_zip(b"P0\n."),
        "a storage too small": torch_zip(tensor_pickle(count=4), {"0": b"\0" * 8}),
        "a tensor outside its storage": torch_zip(tensor_pickle(offset=3), {"0": b"\0" * 16}),
        "a negative offset": torch_zip(tensor_pickle(offset=-1), {"0": b"\0" * 16}),
        "a negative stride": torch_zip(tensor_pickle(stride=(-2, 1)), {"0": b"\0" * 16}),
        "a negative size": torch_zip(tensor_pickle(shape=(-2, 2)), {"0": b"\0" * 16}),
        "a broadcast of exabytes": torch_zip(tensor_pickle(shape=(1 << 40, 1 << 40), stride=(0, 0)), {"0": b"\0" * 16}),
        "a storage that is missing": torch_zip(tensor_pickle(key=b"7"), {"0": b"\0" * 16}),
        "a storage of unknown kind": torch_zip(tensor_pickle(kind=b"cos\nsystem\n"), {"0": b"\0" * 16}),
        "zip slip": rank_zip((MEMBER, good), ("../../evil", b"x")),
        "an absolute member": rank_zip((MEMBER, good), ("/evil", b"x")),
        "a backslash member": rank_zip((MEMBER, good), ("..\\evil", b"x")),
        "a zip bomb": rank_zip((MEMBER, b"\0" * (64 * mebi)), compression=zipfile.ZIP_DEFLATED),
        "overlapping members": overlapping(good),
        "a symlink member": symlink(good),
        "a member of two names": renamed_inside(good),
        "a duplicate member": duplicated(good),
        "a zip of nothing": counting_none(good),
        "half a size": half_a_size(good),
        "half of a zip": truncated_length(rank_zip((MEMBER, good))),
        "half of a file": truncated_length(good),
        "nothing but a magic": b"PK\x03\x04",
        "text": b"hello, world\n" * 10,
    }


# The peak of the process that runs the program itself: what wait4 reports would include this one's size before exec.
PROGRAM = """
import pathlib, sys
from holdfast.cli import main
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path(sys.argv[-1] + ".peak").write_text(status.split("VmHWM:")[1].split()[0])
"""


def test_every_hostile_file_is_refused(tmp_path):
    mark = tmp_path / "executed"
    for name, content in hostile_files(mark, tiny(tmp_path / "good").read_bytes()).items():
        path, target = tmp_path / "file.pt", tmp_path / "out"
        path.write_bytes(content)
        with pytest.raises(HoldfastError):
            convert(path, target, true_vocab_size=5)
        assert not mark.exists() and not target.exists(), name


EVERY = 6


@pytest.mark.parametrize("first", mostly_slow(range(EVERY), [0]))
def test_every_hostile_file_ends_with_one_line_and_runs_nothing(tmp_path, first):
    """Through the program itself: one process per file, its exit code, its output, its peak memory."""
    mark = tmp_path / "executed"
    files = hostile_files(mark, tiny(tmp_path / "good").read_bytes())
    for number, (name, content) in list(enumerate(files.items()))[first::EVERY]:
        path, target = tmp_path / f"{number}.pt", tmp_path / f"out{number}"
        path.write_bytes(content)
        command = [sys.executable, "-c", PROGRAM, "convert", "--true-vocab-size", "5", str(path), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and not done.stdout, (name, done.stderr)
        assert done.stderr.startswith("holdfast: error: ") and done.stderr.count("\n") == 1, (name, done.stderr)
        peak = int(Path(f"{target}.peak").read_text())
        assert peak < 512 * 1024, (name, peak)
        assert not mark.exists() and not target.exists(), name
        path.unlink()


@pytest.mark.parametrize("zip_form", [True, False])
def test_a_file_cut_at_every_thousandth_byte_is_refused(tmp_path, zip_form):
    spec = Spec()
    run = write_megatron(tmp_path / "run", spec, make_truth(spec, spec.padded(1)), 3.0, zip_form=zip_form)
    path = run / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    whole = path.read_bytes()
    read_model(path)
    for length in range(1, len(whole), 1000):
        path.write_bytes(whole[:length])
        with pytest.raises(HoldfastError):
            read_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(checkpoint_version=1 << 2000), "checkpoint version .* is unknown"),
        (
            lambda state: renamed(state, "layers.0.input_layernorm", "layers.input_layernorm"),
            "a layer without its number",
        ),
        (lambda state: renamed(state, "layers.0.", f"layers.{'9' * 500}."), "cannot convert exactly"),
    ],
    ids=["a version beyond all floats", "a layer without a number", "a number of 500 digits"],
)
def test_forged_names_and_versions_are_refused(tmp_path, change, message):
    path = tiny(tmp_path / "run")
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    with pytest.raises(HoldfastError, match=message):
        read_model(path)


def renamed(state: dict, old: str, new: str) -> None:
    stack = state["model"]["language_model"]["encoder"]
    state["model"]["language_model"]["encoder"] = {name.replace(old, new): value for name, value in stack.items()}


@pytest.mark.parametrize("iteration", [-1, 1 << 2000], ids=["negative", "huge"])
def test_an_iteration_that_no_run_has_is_ignored(tmp_path, iteration):
    path = tiny(tmp_path / "run")
    state = torch.load(path, weights_only=False)
    state["iteration"] = iteration
    torch.save(state, path)
    assert read_model(path).iteration is None
    assert (convert(path, tmp_path / "out", "holdfast", true_vocab_size=5) / "checkpoints/step-00000000").is_dir()


def test_a_hostile_object_beside_the_weights_is_inert(tmp_path):
    mark = tmp_path / "executed"
    path = tiny(tmp_path / "run")
    state = torch.load(path, weights_only=False)
    state["optimizer"] = Shell(mark)
    torch.save(state, path)
    model = read_model(path)
    assert model.facts["objects_not_loaded"] == ["argparse.Namespace", f"{os.system.__module__}.system"]
    assert not mark.exists()


def test_pickles_of_every_protocol_are_read_as_data():
    value = {"a": [1, 2.5, None, True], "b": ("x", b"yz", 1 << 70, -5), "c": {"d": {}}, "e": "ü" * 300, 3: [[], ()]}
    for protocol in range(3, 6):
        found, length, names = load_pickle(memoryview(pickle.dumps(value, protocol) + b"rest"), Budget())
        assert found == value and length == len(pickle.dumps(value, protocol)) and not names


def test_both_forms_of_torch_files_are_read_as_torch_reads_them(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tree = {
        "t": base,
        "view": base[1:, ::2],
        "turned": base.T,
        "half": base.half(),
        "bf": base.bfloat16(),
        "long": base.long(),
    }
    for zip_form in (True, False):
        torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=zip_form)
        found = load_torch(map_file(tmp_path / "x.pt"), Budget()).tree
        for name, tensor in tree.items():
            bits = (
                tensor.contiguous()
                .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
                .numpy()
            )
            assert (found[name].view().astype(bits.dtype) == bits).all(), name


def test_zips_of_the_standard_library_are_read_like_it_reads_them(tmp_path):
    content = os.urandom(3000)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = tmp_path / "x.zip"
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("a/b", content)
            archive.writestr("folder/", b"")
            with archive.open(zipfile.ZipInfo("big"), "w", force_zip64=True) as member:
                member.write(content)
        region = map_file(path)
        members = read_directory(region, Budget())
        assert set(members) == {"a/b", "folder/", "big"} and members["a/b"].crc == zlib.crc32(content)

"""Thousands of damaged files: a model comes out, or our own error; never anything else, and never for long."""

import random
import time
from pathlib import Path

import pytest

from holdfast.conversion.sources import read_model
from holdfast.system.errors import HoldfastError
from tests.conversion.files.test_hostile import MEMBER, rank_zip
from tests.conversion.huggingface.test_huggingface import build
from tests.conversion.megatron.test_torch_dist import write_torch_dist
from tests.conversion.megatron_files import Spec, make_truth, write_megatron

INTERESTING = [
    bytes.fromhex(word) for word in ("00", "ff", "7f", "ffff", "ffffffff", "00000080", "ffffffffffffffff", "00" * 8)
]
OPCODES = b".(0129NJKMIGXUT\x8a\x8b\x8c\x8d\x8e\x80\x81\x85\x86\x87\x93\x94\x95]aelt})suQRbcqrhj"
SPEC = Spec(layers=1, hidden=8, heads=2, ffn=8, positions=4, vocab=10)


def mutate(content: bytes, luck: random.Random) -> bytes:
    """A few random edits, as a bad disk or a bad person would make them."""
    data = bytearray(content)
    for _ in range(luck.choice((1, 1, 1, 2, 4, 16))):
        at = luck.randrange(len(data)) if data else 0
        kind = luck.randrange(8)
        if kind == 0 and data:
            data[at] ^= 1 << luck.randrange(8)
        elif kind == 1 and data:
            data[at] = luck.randrange(256)
        elif kind == 2:
            word = luck.choice(INTERESTING)
            data[at : at + len(word)] = word
        elif kind == 3:
            del data[at : at + luck.randrange(1, 64)]
        elif kind == 4:
            data[at:at] = luck.randbytes(luck.randrange(1, 32))
        elif kind == 5:
            source = luck.randrange(len(data)) if data else 0
            data[at:at] = data[source : source + luck.randrange(1, 64)]
        elif kind == 6:
            data[at : at + 1] = bytes([luck.choice(OPCODES)])
        elif luck.random() < 0.2:
            del data[at:]
    return bytes(data)


def sources(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    """Kind → what to read, and the file in it to damage."""
    truth = make_truth(SPEC, SPEC.padded(1))
    found = {}
    for name, zip_form in (("zip", True), ("legacy", False)):
        run = write_megatron(tmp_path / name, SPEC, truth, 3.0, zip_form=zip_form)
        file = run / "iter_0000100/mp_rank_00/model_optim_rng.pt"
        found[name] = (file, file)
    release = tmp_path / "release.zip"
    release.write_bytes(rank_zip((MEMBER, found["zip"][0].read_bytes())))
    found["release"] = (release, release)
    folder = write_torch_dist(tmp_path / "torch_dist", SPEC, truth) / "iter_0000040"
    found["metadata"] = (folder, folder / ".metadata")
    found["chunks"] = (folder, next(folder.glob("*.distcp")))
    build("gpt2").save_pretrained(tmp_path / "hf")
    found["safetensors"] = (tmp_path / "hf", tmp_path / "hf/model.safetensors")
    found["config"] = (tmp_path / "hf", tmp_path / "hf/config.json")
    return found


def read_all(path: Path) -> None:
    for tensor in read_model(path).tensors.values():
        for block in tensor.blocks():
            block.sum()


def fuzz(tmp_path: Path, cases: int, seed: int) -> dict[str, int]:
    survived = {}
    kinds = sources(tmp_path)
    for kind, (path, file) in kinds.items():
        luck = random.Random(f"{seed} {kind}")
        original = file.read_bytes()
        read_all(path)
        # Most edits of a large file hit weights, which are all valid: damage where the structure is.
        start = len(original) - 2000 if kind in ("zip", "release", "chunks") else 0
        survived[kind] = 0
        for number in range(cases // len(kinds)):
            if number % 2 and len(original) > 3000:
                cut = max(0, start) if number % 4 == 1 else 0
                content = original[:cut] + mutate(original[cut : cut + 2000], luck) + original[cut + 2000 :]
            else:
                content = mutate(original, luck)
            file.write_bytes(content)
            begin = time.monotonic()
            try:
                read_all(path)
                survived[kind] += 1
            except HoldfastError as error:
                assert "\n" not in str(error)
            assert time.monotonic() - begin < 60, (kind, number)
        file.write_bytes(original)
    return survived


@pytest.mark.parametrize("cases", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_end_in_a_model_or_our_own_error(tmp_path, cases):
    survived = fuzz(tmp_path, cases, seed=1)
    # If everything survived, nothing was damaged; if nothing did, only the first check was tested.
    assert all(0 < count < cases // len(survived) for count in survived.values()), survived


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_more_damaged_files(tmp_path, seed):
    fuzz(tmp_path, 50_000, seed)

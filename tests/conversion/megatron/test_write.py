"""What is written for Megatron is what Megatron would have written: for every layout the generator's own files, bit for bit."""

import argparse
import pickle
import zipfile
from itertools import product

import pytest
import torch

from holdfast import convert
from holdfast.conversion.command import ConvertOptions
from holdfast.conversion.converting import run_conversion
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.megatron_files import Spec, make_truth, write_megatron

SAFE = [argparse.Namespace]


def load(path):
    with torch.serialization.safe_globals(SAFE):
        return torch.load(path, weights_only=True)


def flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def assert_same_ranks(found, wanted):
    files = sorted(path.relative_to(wanted / "iter_0000100") for path in wanted.glob("iter_*/*/*.pt"))
    assert files == sorted(path.relative_to(found / "release") for path in found.glob("release/*/*.pt"))
    for file in files:
        ours, theirs = load(found / "release" / file), load(wanted / "iter_0000100" / file)
        left, right = dict(flat(ours["model"])), dict(flat(theirs["model"]))
        assert left.keys() == right.keys(), file
        for name, tensor in right.items():
            assert left[name].dtype == tensor.dtype and torch.equal(left[name], tensor), (file, name)
        for key, value in vars(theirs["args"]).items():
            if key not in ("bias_gelu_fusion", "openai_gelu", "model_parallel_size"):
                assert getattr(ours["args"], key) == value, key


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("names", ["legacy", "mcore"])
def test_megatron_to_hugging_face_and_back_is_byte_exact(tmp_path, family, names):
    spec = Spec(family=family)
    for tp, pp in product((1, 2, 4), (1, 2)):
        place = tmp_path / f"{tp}{pp}"
        source = write_megatron(place / "m", spec, make_truth(spec, spec.padded(tp)), 3.0, tp, pp, 1, names)
        middle = convert(source, place / "hf", true_vocab_size=spec.vocab, keep_padding=True)
        options = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "megatron_names": names}
        assert_same_ranks(convert(middle, place / "back", to="megatron", **options), source)


def test_a_llama_type_model_goes_there_and_back(tmp_path):
    spec = Spec(swiglu=True, groups=2, dtype=torch.bfloat16)
    for tp, pp in product((1, 2), (1, 2)):
        place = tmp_path / f"{tp}{pp}"
        source = write_megatron(place / "m", spec, make_truth(spec, spec.padded(tp)), 3.0, tp, pp, 1, "mcore")
        middle = convert(source, place / "hf", true_vocab_size=spec.vocab, keep_padding=True)
        options = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        assert_same_ranks(convert(middle, place / "back", to="megatron", **options), source)


def test_a_checkpoint_is_resharded_in_one_step(tmp_path):
    """Version 0, TP 4 × PP 2, straight to TP 2: as if the generator had written TP 2 from the same truth."""
    spec = Spec(vocab=96, multiple=8)  # no padding in any layout, so that the truth is one
    truth = make_truth(spec, 96)
    source = write_megatron(tmp_path / "m", spec, truth, 0, 4, 2, 1, "ancient", true_vocab_size=96)
    wanted = write_megatron(tmp_path / "w", spec, truth, 3.0, 2, 1, 1, "legacy")
    found = convert(source, tmp_path / "out", to="megatron", tensor_model_parallel_size=2, megatron_names="legacy")
    assert_same_ranks(found, wanted)


def test_padding_repeats_the_last_row_and_follows_the_layout(tmp_path):
    spec = Spec(vocab=101, multiple=8)
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    middle = convert(source, tmp_path / "hf", true_vocab_size=101)
    found = convert(
        middle, tmp_path / "back", to="megatron", tensor_model_parallel_size=4, make_vocab_size_divisible_by=16
    )
    shards = [load(found / f"release/mp_rank_{rank:02d}/model_optim_rng.pt") for rank in range(4)]
    table = torch.cat([shard["model"]["embedding.word_embeddings.weight"] for shard in shards])
    assert table.shape[0] == 128 and all(torch.equal(row, table[100]) for row in table[101:])
    assert shards[0]["args"].padded_vocab_size == 128 and shards[0]["args"].true_vocab_size == 101
    assert (found / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_the_files_are_plain_zips_with_nothing_but_tensors_and_values(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    found = convert(source, tmp_path / "out", to="megatron", true_vocab_size=spec.vocab)
    path = found / "release/mp_rank_00/model_optim_rng.pt"
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every checksum right
        pickled = archive.read("model_optim_rng/data.pkl")
        for info in archive.infolist():
            start = info.header_offset + 30 + len(info.filename.encode())
            extra = int.from_bytes(path.read_bytes()[info.header_offset + 28 : info.header_offset + 30], "little")
            assert (start + extra) % 64 == 0, info.filename
    import pickletools

    names = {argument for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    assert names == {
        "argparse Namespace", "collections OrderedDict", "torch HalfStorage", "torch float16", "torch._utils _rebuild_tensor_v2",
    }  # fmt: skip
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(pickled)  # storages are outside the pickle, as torch has it
    assert torch.load(path, mmap=True, weights_only=False)["checkpoint_version"] == 3.0


def test_layouts_that_do_not_divide_are_refused(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    for options, error, said in (
        ({"tensor_model_parallel_size": 3}, HoldfastError, "4 heads cannot be divided among 3"),
        ({"pipeline_model_parallel_size": 9}, HoldfastError, "4 layers are fewer than 9 pipeline stages"),
        ({"tensor_model_parallel_size": 0}, UsageError, "must be at least 1"),
    ):
        with pytest.raises(error, match=said):
            convert(source, tmp_path / "out", to="megatron", true_vocab_size=spec.vocab, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("names", "exact"), [("legacy", True), ("mcore", False)])
def test_a_tanh_head_of_bert_is_kept_where_megatron_has_it_and_said_where_not(tmp_path, names, exact):
    spec = Spec(family="bert")
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0, openai_gelu=True)
    options = {"true_vocab_size": spec.vocab, "megatron_names": names, "verify": True}
    report = run_conversion(ConvertOptions(source=source, destination=tmp_path / "out", to="megatron", **options))
    assert any("4.8e-4" in note for note in report.notes) is not exact
    args = vars(load(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt")["args"])
    assert (args["openai_gelu"], args["bias_gelu_fusion"]) == ((True, False) if exact else (False, True))
    assert report.verification["largest_difference"] < 1e-12 and report.verification["exact"] is exact


def test_the_optimizer_that_stays_behind_is_said(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "m", spec, make_truth(spec, spec.padded(1)), 3.0)
    path = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    torch.save({**torch.load(path, weights_only=False), "optimizer": {"state": {}}}, path)
    for to in ("hf", "megatron", "holdfast"):
        report = run_conversion(
            ConvertOptions(source=source, destination=tmp_path / to, to=to, true_vocab_size=spec.vocab)
        )
        assert any(note.startswith("optimizer state not converted") for note in report.notes)

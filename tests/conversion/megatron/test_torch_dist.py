"""torch_dist folders as torch's own DCP writes them: layers stacked or not, with common.pt or without, hostile or damaged."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast import convert
from holdfast.system.errors import HoldfastError
from tests.conversion.megatron.test_read import assert_same
from tests.conversion.megatron_files import Spec, make_args, make_truth, model_part


def stack_layers(flat, layers):
    """As Megatron-core stores homogeneous layers: one tensor per name, norms under Transformer Engine's names."""
    found = {}
    for name, tensor in flat.items():
        if tensor is None:
            continue
        parts = name.split(".")
        if parts[1] != "layers":
            found[name] = tensor
        elif parts[2] == "0":
            rest = ".".join(parts[3:])
            whole = torch.stack([flat[f"{parts[0]}.layers.{i}.{rest}"] for i in range(layers)])
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            found[f"{parts[0]}.layers.{rest.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')}"] = whole
    return found


def write_torch_dist(folder, spec, truth, stacked=True, common=True):
    flat = model_part(spec, truth, range(spec.layers), True, True, 3.0, 1, 0, "mcore", 1)
    state = stack_layers(flat, spec.layers) if stacked else {name: t for name, t in flat.items() if t is not None}
    state["optimizer.state.exp_avg.embedding.word_embeddings.weight"] = torch.zeros(4)
    values = {"args": make_args(spec, 1, 1, 3.0), "iteration": 40, "checkpoint_version": 3.0}
    target = folder / "iter_0000040"
    target.mkdir(parents=True)
    dcp.save({**state, **({} if common else values)}, checkpoint_id=target, no_dist=True)
    if common:
        torch.save(values, target / "common.pt")
    (target / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("40")
    return folder


@pytest.mark.parametrize("family", ["gpt", "bert", "llama"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("common", [True, False])
def test_the_tensors_are_bit_exact(tmp_path, family, stacked, common):
    spec = Spec(swiglu=True, groups=2) if family == "llama" else Spec(family=family)
    truth = make_truth(spec, spec.padded(1))
    source = write_torch_dist(tmp_path / "m", spec, truth, stacked, common)
    assert_same(convert(source, tmp_path / "hf", true_vocab_size=spec.vocab), spec, truth)
    assert_same(convert(source / "iter_0000040", tmp_path / "hf2", true_vocab_size=spec.vocab), spec, truth)


class Shell:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_hostile_index_runs_nothing(tmp_path):
    spec = Spec()
    source = write_torch_dist(tmp_path / "m", spec, make_truth(spec, spec.padded(1)))
    mark = tmp_path / "executed"
    metadata = source / "iter_0000040/.metadata"
    original = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps(Shell(mark)))
    with pytest.raises(HoldfastError, match="does not describe a distributed checkpoint"):
        convert(source, tmp_path / "hf", true_vocab_size=spec.vocab)
    original.planner_data = Shell(mark)  # right in everything else: read, and nothing run
    metadata.write_bytes(pickle.dumps(original))
    convert(source, tmp_path / "hf", true_vocab_size=spec.vocab)
    torch.save({"args": Shell(mark)}, source / "iter_0000040/common.pt")
    with pytest.raises(HoldfastError):
        convert(source, tmp_path / "hf2", true_vocab_size=spec.vocab)
    assert not mark.exists()


def test_wrong_places_and_missing_files_are_refused(tmp_path):
    spec = Spec()
    for number, (change, message) in enumerate(
        [
            (lambda info: setattr(info, "relative_path", "../../etc/passwd"), "outside the folder"),
            (lambda info: setattr(info, "relative_path", "gone.distcp"), "gone.distcp is missing"),
            (lambda info: setattr(info, "offset", 1 << 40), "ends beyond its file"),
            (lambda info: setattr(info, "length", 100), "zip"),
        ]
    ):
        source = write_torch_dist(tmp_path / f"m{number}", spec, make_truth(spec, spec.padded(1)))
        path = source / "iter_0000040/.metadata"
        metadata = pickle.loads(path.read_bytes())
        info = next(info for key, info in metadata.storage_data.items() if "linear_qkv.weight" in key.fqn)
        change(info)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(HoldfastError) as caught:
            convert(source, tmp_path / "out", true_vocab_size=spec.vocab)
        assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize("where", ["", "iter_0000040"])
@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_other_distributed_formats_are_refused_by_name(tmp_path, backend, where):
    folder = tmp_path / "m/iter_0000040"
    folder.mkdir(parents=True)
    (tmp_path / "m/latest_checkpointed_iteration.txt").write_text("40")
    (folder / "metadata.json").write_text(f'{{"sharded_backend": "{backend}", "sharded_backend_version": 1}}')
    with pytest.raises(HoldfastError, match=f"of the format '{backend}'; .* --ckpt-format torch_dist"):
        convert(tmp_path / "m" / where, tmp_path / "hf")


def test_a_save_that_was_not_completed_is_named(tmp_path):
    spec = Spec()
    source = write_torch_dist(tmp_path / "m", spec, make_truth(spec, spec.padded(1)))
    (source / "iter_0000040/.metadata").unlink()
    with pytest.raises(HoldfastError, match=r"no \.metadata: the save was not completed"):
        convert(source / "iter_0000040", tmp_path / "hf", true_vocab_size=spec.vocab)

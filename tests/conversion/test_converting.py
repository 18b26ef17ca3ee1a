"""The whole way round without torch, transformers or Megatron, and the verb's own manners."""

import json
import subprocess
import sys

import pytest

from holdfast import convert
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.megatron.test_read import assert_same
from tests.conversion.megatron_files import Spec, make_truth, write_megatron

ROUND = """
import sys
for name in ("torch", "transformers", "megatron"):
    sys.modules[name] = None  # an import of it fails
from holdfast import convert
from holdfast.inspection import inspect_path
source, work = sys.argv[1:]
hf = convert(source, f"{work}/hf", true_vocab_size=101, verify=True)
megatron = convert(hf, f"{work}/megatron", to="megatron", tensor_model_parallel_size=2, verify=True)
run = convert(megatron, f"{work}/run", to="holdfast", verify=True)
convert(run, f"{work}/back", dtype="float16", verify=True)
for path in (source, hf, megatron, run):
    inspect_path(path)
"""


def test_no_direction_needs_torch(tmp_path):
    spec = Spec()
    truth = make_truth(spec, spec.padded(1))
    source = write_megatron(tmp_path / "source", spec, truth, 1.0)
    done = subprocess.run(
        [sys.executable, "-c", ROUND, str(source), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "back", spec, truth)


def test_json_describes_the_conversion(tmp_path, capsys):
    from holdfast.cli import run

    spec = Spec()
    source = write_megatron(tmp_path / "source", spec, make_truth(spec, spec.padded(1)), 3.0)
    run(["convert", str(source), str(tmp_path / "hf"), "--true-vocab-size", str(spec.vocab), "--verify", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["destination"] == str(tmp_path / "hf") and report["tensors"] == 52 and report["verification"]["exact"]


def test_wrong_options_are_refused_before_anything_is_written(tmp_path):
    spec = Spec()
    source = write_megatron(tmp_path / "source", spec, make_truth(spec, spec.padded(1)), 3.0)
    for options, error in (
        ({"to": "gguf"}, UsageError),
        ({"dtype": "int8"}, UsageError),
        ({"max_shard_size": "many"}, UsageError),
        ({"true_vocab_size": 0}, UsageError),
        ({"vocab_file": "no-such-vocab.json", "merge_file": "no-such-merges.txt"}, HoldfastError),
        ({"checkpoint_version": 7.0}, HoldfastError),
    ):
        with pytest.raises(error):
            convert(source, tmp_path / "out", **{"true_vocab_size": spec.vocab, **options})
        assert not (tmp_path / "out").exists()
    with pytest.raises(HoldfastError, match="no such file"):
        convert(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(HoldfastError, match="lies inside the source"):
        convert(source, source / "out", true_vocab_size=spec.vocab)

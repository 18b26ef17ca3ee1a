"""`bench convert`: a release zip of GPT-2's 345M size in fp16 to a Hugging Face folder, beside the plain copy of the zip.

The copy is the lower bound: it reads and writes the same bytes and syncs them. Contenders run as processes of their own,
start-up and imports included. Peak memory is that of the process itself, as the kernel counts it.
"""

import functools
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from holdfast.bench.harness import (
    ProcessCost,
    Row,
    Tables,
    median,
    median_ratio,
    refuse_unknown,
    run_process,
    run_rounds,
    show,
)
from holdfast.conversion.stream import PlannedFile, WritePlan, write_plan
from holdfast.conversion.tensors import Tensor, tensor_of

MEMBER = "release/mp_rank_00/model_optim_rng.pt"
VOCABULARY, PADDED = 50257, 50304

COPY = """
import os, shutil, sys
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    sent = 0
    while count := os.sendfile(target.fileno(), source.fileno(), sent, 1 << 30):
        sent += count
    os.fsync(target.fileno())
"""
HOLDFAST = """
from holdfast.cli import main
main()
"""
# What one writes by hand today: unpack, map with torch, reorder and transpose, save with safetensors.
TORCH = """
import os, sys, tempfile, zipfile, torch
from safetensors.torch import save_file
source, target = sys.argv[1], sys.argv[2]
os.makedirs(target)
with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
    with zipfile.ZipFile(source) as archive:
        path = archive.extract("release/mp_rank_00/model_optim_rng.pt", folder)
    model = torch.load(path, mmap=True, weights_only=True)["model"]["language_model"]
    out = {"transformer.wte.weight": model["embedding"]["word_embeddings"]["weight"][:50257].contiguous()}
    out["transformer.wpe.weight"] = model["embedding"]["position_embeddings"]["weight"]
    names = {"input_layernorm": "ln_1", "attention.query_key_value": "attn.c_attn", "attention.dense": "attn.c_proj",
             "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}
    for name, tensor in model["transformer"].items():
        if name.startswith("final_layernorm"):
            out["transformer.ln_f." + name.split(".")[-1]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        if tensor.ndim == 2:
            tensor = tensor.T.contiguous()
        out[f"transformer.h.{layer}.{names[module]}.{kind}"] = tensor
    save_file(out, os.path.join(target, "model.safetensors"), {"format": "pt"})
descriptor = os.open(os.path.join(target, "model.safetensors"), os.O_RDONLY)
os.fsync(descriptor)
"""
PEAK = """
import atexit, pathlib
def _write_peak():
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path({peak!r}).write_text(status.split("VmHWM:")[1].split()[0])
atexit.register(_write_peak)
"""


def write_release(folder: Path, layers: int, hidden: int) -> Path:
    """A release zip as NVIDIA's is: version 0, no args, fp16, one rank, stored. The values are random and repeat."""
    pool = np.random.default_rng(0).integers(0, 1 << 14, 1 << 25, dtype=np.uint16)
    offset = 0

    def take(*shape: int) -> Tensor:
        nonlocal offset
        count = int(np.prod(shape))
        if count > pool.size - offset:
            offset = offset % 64  # another phase of the pool
        if count > pool.size:
            whole = np.concatenate([pool] * (count // pool.size + 1))[:count]
            return tensor_of(whole.reshape(shape), "F16")
        offset += count
        return tensor_of(pool[offset - count : offset].reshape(shape), "F16")

    tensors = {"word": take(PADDED, hidden), "position": take(1024, hidden)}
    stack: dict[str, Tensor] = {}
    for layer in range(layers):
        for name, shape in (
            ("input_layernorm", (hidden,)), ("attention.query_key_value", (3 * hidden, hidden)),
            ("attention.dense", (hidden, hidden)), ("post_attention_layernorm", (hidden,)),
            ("mlp.dense_h_to_4h", (4 * hidden, hidden)), ("mlp.dense_4h_to_h", (hidden, 4 * hidden)),
        ):  # fmt: skip
            stack[f"layers.{layer}.{name}.weight"] = take(*shape)
            stack[f"layers.{layer}.{name}.bias"] = take(shape[0])
    stack |= {f"final_layernorm.{kind}": take(hidden) for kind in ("weight", "bias")}
    embedding = {"word_embeddings": {"weight": tensors["word"]}, "position_embeddings": {"weight": tensors["position"]}}
    tree = {"model": {"language_model": {"embedding": embedding, "transformer": stack}}}
    write_plan(WritePlan([PlannedFile("model.pt", {**tensors, **stack}, tree=tree)]), folder, [])
    path = folder / "release.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.write(folder / "model.pt", MEMBER)
    (folder / "model.pt").unlink()
    return path


@dataclass(frozen=True, kw_only=True)
class ConvertBench:
    """Measure a Megatron release zip (fp16) to Hugging Face safetensors, beside a synced copy of the zip.

    Examples:

      holdfast bench convert
      holdfast bench convert --layers 4 --rounds 2 --against --json
    """

    against: tuple[str, ...] = ("torch",)
    """Peers: torch (torch.load with mmap, transposes, safetensors' save_file)."""
    layers: int = 24
    """Layers of the synthetic model; 24 × 1024 is the 345M release, 240 × 1024 ten times its layers."""
    hidden_size: int = 1024
    """Width of the synthetic model."""
    rounds: int = 5
    """How often each contender runs."""
    folder: str | None = None
    """Where to work; needs about three times the model's size. Unset: the temporary folder."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: ConvertBench) -> None:
    show("convert", run(options), options.json)


def run(options: ConvertBench) -> Tables:
    refuse_unknown(options.against, ["torch"])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        source = write_release(work, options.layers, options.hidden_size)
        size = source.stat().st_size
        paths, heads = [str(source), str(work / "out")], str(options.hidden_size // 64)
        flags = ["--num-attention-heads", heads, "--true-vocab-size", str(VOCABULARY)]
        programs = {"copy": [COPY, *paths], "holdfast": [HOLDFAST, "convert", *paths, *flags]}
        if "torch" in options.against:
            programs["torch"] = [TORCH, *paths]
        turns = {name: functools.partial(_turn, name, program, work) for name, program in programs.items()}
        costs = run_rounds(turns, options.rounds)
    title = f"{options.layers} × {options.hidden_size}, fp16, {size / 1e6:,.0f} MB, {options.rounds} rounds"
    return {title: [_row(name, own, costs["copy"]) for name, own in costs.items()]}


def _turn(name: str, program: list[str], work: Path) -> ProcessCost:
    peak = work / "peak"
    cost = run_process(name, [sys.executable, "-c", PEAK.format(peak=str(peak)) + program[0], *program[1:]])
    subprocess.run(["rm", "-rf", str(work / "out")], check=True)
    return replace(cost, memory=int(peak.read_text()) * 1024)


def _row(name: str, costs: list[ProcessCost], copies: list[ProcessCost]) -> Row:
    return {
        "contender": name,
        "median s": median(costs, lambda one: one.wall),
        "× copy": median_ratio(costs, copies, lambda one: one.wall),
        "best × copy": min(own.wall / copy.wall for own, copy in zip(costs, copies, strict=True)),
        "CPU s": median(costs, lambda one: one.cpu),
        "peak RSS MB": max(one.memory for one in costs) / 1e6,
    }

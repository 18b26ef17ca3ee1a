"""How conversion compares: a release zip of GPT-2's 345M size in fp16 to a Hugging Face folder, beside the plain copy of the zip.

The copy is the floor: it reads and writes the same bytes and syncs them. Contenders run as processes of their own, start-up and
imports included, in turns within a round; ratios are taken within a round and their median is reported. Peak memory is that of
the process itself.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.bench.command import Tables, refuse_unknown, show
from holdfast.conversion.stream import Plan, PlannedFile, write_plan
from holdfast.conversion.tensors import Tensor, tensor_of
from holdfast.system.errors import HoldfastError

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
source, target, heads = sys.argv[1], sys.argv[2], int(sys.argv[3])
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

    tensors: dict[str, Tensor] = {"word": take(PADDED, hidden), "position": take(1024, hidden)}
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
    write_plan(Plan([PlannedFile("model.pt", {**tensors, **stack}, tree=tree)]), folder, [])
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
    heads = str(options.hidden_size // 64)
    contenders: dict[str, tuple[str, list[str]]] = {"copy": (COPY, []), "holdfast": (HOLDFAST, [])}
    if "torch" in options.against:
        contenders["torch"] = (TORCH, [heads])
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source = write_release(Path(work), options.layers, options.hidden_size)
        size = source.stat().st_size
        os.sync()
        for _ in range(options.rounds):
            for name, (program, more) in contenders.items():
                target = Path(work, "out")
                arguments = [str(source), str(target), *more]
                if name == "holdfast":
                    arguments = [
                        "convert",
                        *arguments,
                        "--num-attention-heads",
                        heads,
                        "--true-vocab-size",
                        str(VOCABULARY),
                    ]
                taken, worked, peak = _time(program, arguments, Path(work))
                seconds[name].append(taken)
                cpu[name].append(worked)
                peaks[name] = max(peaks.get(name, 0), peak)
                subprocess.run(["rm", "-rf", str(target)], check=True)
    title = f"{options.layers} × {options.hidden_size}, fp16, {size / 1e6:,.0f} MB, {options.rounds} rounds"
    return {title: [_row(name, seconds, cpu, peaks[name]) for name in contenders]}


def _row(name: str, seconds: dict[str, list[float]], cpu: dict[str, list[float]], peak: float) -> dict[str, Any]:
    ratios = [own / copy for own, copy in zip(seconds[name], seconds["copy"], strict=True)]
    return {
        "contender": name,
        "median s": statistics.median(seconds[name]),
        "× copy": statistics.median(ratios),
        "best × copy": min(ratios),
        "CPU s": statistics.median(cpu[name]),
        "peak RSS MB": peak,
    }


def _time(program: str, arguments: list[str], work: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak megabytes of one process."""
    peak = work / "peak"
    command = [sys.executable, "-c", PEAK.format(peak=str(peak)) + program, *arguments]
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    taken = time.perf_counter() - begin
    if done.returncode:
        raise HoldfastError(f"a contender failed: {done.stderr.strip()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken, worked, int(peak.read_text()) / 1000

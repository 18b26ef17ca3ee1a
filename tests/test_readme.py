"""Run every command of the README in order, as it is printed there, on a small text."""

import os
import re
import subprocess
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import orjson
import pytest

from tests.fenced_blocks import ROOT, bash_blocks, run_python_blocks


def commands() -> list[str]:
    lines = [line.split(" #")[0].strip() for block in bash_blocks(ROOT / "README.md") for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_readmes_commands_run(tmp_path):
    sources = sorted((ROOT / "src").rglob("*.py"))
    lines = [orjson.dumps({"text": source.read_text()}) for source in sources]
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    verbs = set()
    for command in commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        verbs.add(command.split()[1])
    assert verbs >= {"fetch", "tokenizer", "preprocess", "inspect", "train", "convert", "generate"}
    assert (tmp_path / "first-megatron" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_fresh_clone_reaches_a_run_page_and_text_with_make_demo(tmp_path):
    """`make demo` in a clone that has nothing but the commit. The packages are those of this environment: pip is not tested."""
    clone = tmp_path / "a folder" / "clone"
    if subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], capture_output=True).returncode:
        pytest.skip("the tests do not run in a git checkout")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True, timeout=120)
    (site,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "paths.pth").write_text("\n".join([str(clone / "src"), *packages]) + "\n")
    program = clone / ".venv" / "bin" / "holdfast"
    program.write_text(f'#!/bin/sh\nexec "{clone}/.venv/bin/python" -m holdfast "$@"\n')
    program.chmod(0o755)
    (clone / ".venv" / ".ready").touch()
    paths = [path for path in os.environ["PATH"].split(":") if not Path(path, "holdfast").exists()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": ":".join(paths)}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, shell=True, cwd=clone, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    (command,) = re.findall(r"`(make demo DEMO=\S+)`", (clone / "README.md").read_text())
    done = run(command)
    assert "def main(" in done.stdout and "resumed from memory" in done.stderr and "bit-identical" in done.stderr
    assert str(clone / "demo" / "report.html") in done.stderr and (clone / "demo" / "report.html").is_file()
    generate, train, init = re.findall(r"^  (.*holdfast .*)$", done.stderr, re.MULTILINE)
    assert run(generate).stdout.startswith("import os")
    run(train.replace("--train-iters 400", "--train-iters 90"))
    (clone / "demo" / "your-text.jsonl").write_text('{"text": "a text"}\n')
    run(f"cd demo; {init.replace('.venv', '../.venv')}")
    (activation,) = re.findall(r"`source (\.venv/bin/activate)`", (clone / "README.md").read_text())
    assert run(f". {activation}; holdfast version").stdout.startswith("holdfast 0.")
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True).stdout


def numbers(text: str) -> list[Decimal]:
    return [
        Decimal(word.replace(",", "")) for word in re.findall(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])", text)
    ]


def section(page: str, anchor: str) -> str:
    """The part of a page below the heading of this anchor."""
    parts = re.split(r"^##+ (.*)\n", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    slugs = [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading)).lower() for heading in parts[1::2]]
    return parts[2::2][slugs.index(anchor)]


def test_the_measured_numbers_of_the_readme_are_in_the_sections_that_it_links_to_rounded_at_most():
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if "](docs/performance.md#" in line]
    assert len(rows) == 6
    for row in rows:
        (anchor,) = re.findall(r"performance\.md#([\w-]+)\)", row)
        current = section("performance.md", anchor)
        archive = [section("performance-archive.md", name) for name in re.findall(r"archive\.md#([\w-]+)\)", current)]
        measured = numbers("\n".join([current, *archive]))
        shown = numbers(re.sub(r"\]\([^)]*\)|`[^`]*`", "", row))
        missing = [number for number in shown if all(round_like(one, number) != number for one in measured)]
        assert shown and not missing, f"{row}: {missing}"


def round_like(measured: Decimal, shown: Decimal) -> Decimal:
    digits = Decimal(1).scaleb(int(shown.as_tuple().exponent))
    return measured.quantize(digits, ROUND_HALF_UP)


def test_the_readmes_snapshot_loop_leaves_its_last_step_on_disk(tmp_path):
    setup = (
        "import torch\n"
        "steps, model = 3, torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "def batch(step): return torch.full((2, 4), float(step))\n"
        "def loss(inputs): return model(inputs).square().mean()\n"
    )
    run_python_blocks(ROOT / "README.md", tmp_path, setup)
    from holdfast.checkpoint import open_checkpoint

    with open_checkpoint(tmp_path / "runs" / "my-run") as checkpoint:
        assert checkpoint.step == 3

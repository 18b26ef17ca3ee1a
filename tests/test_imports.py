"""Imports point one way. Each package may see those named here, itself, and the shared mechanics; nothing else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "holdfast"
MECHANICS = {"system", "command_line", "config", "config_files", "inspection"}
BASIS = MECHANICS | {"assets", "tokenizers"}
STATE = {"checkpoint", "snapshot"}
MAY_SEE: dict[str, set[str]] = {
    "system": set(),
    "command_line": {"system", "config_files", "cli"},
    "config": {"system", "config_files"},
    "config_files": {"system"},
    "assets": MECHANICS,
    "tokenizers": MECHANICS | {"assets"},
    "data": BASIS,
    "models": MECHANICS,
    "parallel": MECHANICS | {"models"},
    "checkpoint": MECHANICS,
    "snapshot": MECHANICS | {"checkpoint"},
    "train": BASIS | STATE | {"data", "models", "parallel"},
    "conversion": BASIS | {"models", "checkpoint"},
    "generation": BASIS | {"models", "conversion", "checkpoint"},
    "launch": BASIS | STATE | {"data", "models", "parallel", "train", "conversion"},
    "report": BASIS | STATE | {"data", "train", "models"},
}
LIBRARY = {"fetch", "preprocess", "convert", "generate"}
ALL = {*MAY_SEE, *LIBRARY, "demo", "bench", "cli"}
MAY_SEE["demo"] = ALL - {"bench"}
MAY_SEE["bench"] = ALL - {"demo", "launch"}


def imported(path: Path) -> set[str]:
    """The parts of Holdfast that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "holdfast":
                names = [f"holdfast.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("holdfast.")}
    return found


@pytest.mark.parametrize("package", MAY_SEE)
def test_a_package_sees_only_what_lies_below_it(package):
    files = [*(ROOT / package).rglob("*.py"), *([ROOT / f"{package}.py"] if (ROOT / f"{package}.py").exists() else [])]
    assert files
    for path in files:
        above = {"train": {"conversion"}, "launch": {"cli"}}.get(package, set()) if path.name == "command.py" else set()
        stray = imported(path) - MAY_SEE[package] - {package} - above
        assert not stray, f"{path.relative_to(ROOT)} imports {sorted(stray)}"


def test_models_never_import_torch_distributed():
    for path in (ROOT / "models").rglob("*.py"):
        assert "torch.distributed" not in path.read_text(), path

"""The shape of the source tree: import directions, import cycles, file names, file sizes and class names.

MAY_SEE is the table of docs/architecture.md: a package may import the packages named there and itself, nothing else.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "holdfast"
MECHANICS = {"system", "command_line", "config", "config_files", "inspection"}
BASIS = MECHANICS | {"assets", "tokenizers"}
STATE = {"checkpoint", "snapshot"}
MAY_SEE: dict[str, set[str]] = {
    "system": set(),
    "command_line": {"system", "config_files", "cli"},
    "model_config": set(),
    "optimizer_config": set(),
    "config": {"system", "config_files", "model_config", "optimizer_config"},
    "config_files": {"system"},
    "assets": MECHANICS,
    "tokenizers": MECHANICS | {"assets"},
    "data": BASIS,
    "kernels": set(),
    "models": MECHANICS | {"kernels"},
    "parallel": MECHANICS | {"models"},
    "checkpoint": MECHANICS,
    "snapshot": MECHANICS | {"checkpoint", "kernels"},
    "train": BASIS | STATE | {"data", "kernels", "models", "parallel"},
    "conversion": BASIS | {"models", "checkpoint"},
    "generation": BASIS | STATE | {"kernels", "models", "conversion"},
    "evaluation": BASIS | {"data", "generation"},
    "serve": BASIS | {"generation"},
    "launch": BASIS | STATE | {"data", "models", "parallel", "train", "conversion"},
    "report": BASIS | STATE | {"data", "train", "models"},
}
LIBRARY = {"fetch", "preprocess", "convert", "generate"}
ALL = {*MAY_SEE, *LIBRARY, "demo", "bench", "cli"}
MAY_SEE["demo"] = ALL - {"bench"}
MAY_SEE["bench"] = ALL - {"demo", "launch"}

# Files that use a package above their own.
LOOKS_UP = {"train/command.py": {"conversion"}, "train/eval_samples.py": {"generation"}, "launch/command.py": {"cli"}}

MAX_LINES = 400
VAGUE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py"}
# Class names that several packages use; the package name distinguishes them.
SHARED_CLASS_NAMES: set[str] = set()

FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    """`data.samples.gpt` for data/samples/gpt.py, `data` for data/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_name(path) for path in FILES}


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """The names below `holdfast.` that import statements among the nodes load."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("holdfast.") for name in names if name.startswith("holdfast.")}


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the file is imported: no function bodies, no TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from module_level(node)


def imported_modules(path: Path) -> set[str]:
    """The modules of Holdfast that importing the file loads first."""
    names = imports(module_level(ast.parse(path.read_text())))
    found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return (found & MODULES) - {"", module_name(path)}


def assert_acyclic(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("package", MAY_SEE)
def test_a_package_imports_only_the_packages_below_it(package):
    files = [path for path in FILES if module_name(path).split(".")[0] == package]
    assert files
    for path in files:
        above = LOOKS_UP.get(f"{package}/{path.name}", set())
        seen = {name.split(".")[0] for name in imports(ast.walk(ast.parse(path.read_text())))}
        stray = seen - MAY_SEE[package] - {package} - above
        assert not stray, f"{path.relative_to(ROOT)} imports {sorted(stray)}"


def test_modules_do_not_import_each_other_in_a_cycle():
    assert_acyclic({module_name(path): imported_modules(path) for path in FILES})


def test_packages_do_not_import_each_other_in_a_cycle():
    graph = defaultdict(set)
    for path in FILES:
        package = module_name(path).split(".")[0]
        graph[package] |= {name.split(".")[0] for name in imported_modules(path)} - {package}
    assert_acyclic(graph)


def test_models_never_import_torch_distributed():
    for path in (ROOT / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute):
                assert "torch.distributed" not in ast.unparse(node).replace("from torch import ", "torch."), path


def test_a_file_name_says_what_the_file_owns():
    assert not [path for path in FILES if path.name in VAGUE_NAMES]


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    assert not too_long, f"more than {MAX_LINES} lines; split by what each part owns: {too_long}"


def test_a_class_name_exists_once():
    defined = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(module_name(path))
    repeated = {
        name: modules for name, modules in defined.items() if len(modules) > 1 and name not in SHARED_CLASS_NAMES
    }
    assert not repeated

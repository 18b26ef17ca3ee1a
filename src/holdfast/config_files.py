"""Finds configuration files: any path, or the bare name of one that comes with Holdfast (`gpt_tiny`)."""

from pathlib import Path

from holdfast.system.errors import UsageError

PACKAGED = Path(__file__).parent / "configs"
CHECKOUT = Path(__file__).parents[2] / "configs"


def known_configs() -> dict[str, Path]:
    """Name → file of the configurations that come with Holdfast, in the wheel or in the checkout of an editable install."""
    folder = PACKAGED if PACKAGED.is_dir() else CHECKOUT
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def find_config(name: Path | str) -> Path:
    """The file of a path or name. A file in the working folder takes precedence over one that comes with Holdfast."""
    path = Path(name)
    for candidate in (path, Path(f"{path}.toml")):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    known = known_configs() if path.parent == Path() else {}
    found = known.get(path.name.removesuffix(".toml"))
    if found is not None:
        return found
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give its config.toml")
    names = f"; those that come with Holdfast are {', '.join(known)}" if known else ""
    raise UsageError(f"{path}: no such configuration file{names}")

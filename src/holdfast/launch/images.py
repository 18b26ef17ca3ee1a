"""The container image: built by Docker, imported by Enroot into a squash file that Pyxis starts from.

The invariant: a `.sqsh` name holds a whole image, and the digest file beside it says which one; the import goes to a temporary
name and is left out when the digest is the same.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from holdfast.system.atomic_files import publish_text, rename_into_place, temporary_beside
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log

DOCKERFILE = Path("deploy", "containers", "Dockerfile")
TAG = "holdfast:latest"


def checkout(given: Path | None = None) -> Path:
    """The build context: the source tree that was given, or the one that this program runs from."""
    root = given or Path(__file__).parents[3]
    if not (root / DOCKERFILE).exists():
        raise UsageError(f"{root} is not a checkout of Holdfast ({DOCKERFILE} is not there); give --context")
    return root


def build_command(tag: str, context: Path, base: str | None, efa: str | None) -> list[str]:
    arguments = {"BASE": base, "EFA_VERSION": efa}
    given = [word for name, value in arguments.items() if value for word in ("--build-arg", f"{name}={value}")]
    return ["docker", "build", "--tag", tag, "--file", str(context / DOCKERFILE), *given, str(context)]


def build(tag: str, context: Path, base: str | None, efa: str | None, dry_run: bool) -> list[str]:
    """Builds the image and returns its tag; with `dry_run` returns the command."""
    command = build_command(tag, context, base, efa)
    if dry_run:
        return [shlex.join(command)]
    run(command)
    return [tag]


def default_squash_file() -> Path:
    return Path(os.environ.get("APPS_PATH", ".")) / "holdfast.sqsh"


def import_image(tag: str, output: Path, dry_run: bool) -> list[str]:
    """Docker's image as a squash file; returns the file's path, with `dry_run` the commands.

    Nothing is done when the file is there and of the same image."""
    temporary = temporary_beside(output)
    command = ["enroot", "import", "--output", str(temporary), f"dockerd://{tag}"]
    record = output.with_name(f"{output.name}.digest")
    if dry_run:
        inspect = ["docker", "image", "inspect", "--format", "{{.Id}}", tag]
        return [shlex.join(words) for words in (inspect, command, ["mv", str(temporary), str(output)])]
    digest = image_digest(tag)
    if output.exists() and record.exists() and record.read_text().strip() == digest:
        log(f"{output} is of {digest} already")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(command)
            rename_into_place(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
        publish_text(record, digest + "\n")
    return [str(output)]


def image_digest(tag: str) -> str:
    return run(["docker", "image", "inspect", "--format", "{{.Id}}", tag], capture=True).strip()


def run(command: list[str], capture: bool = False) -> str:
    """Runs a program with its output shown on stderr; its failure is the user's to see."""
    if shutil.which(command[0]) is None:
        raise HoldfastError(f"{command[0]} is not on this machine; --dry-run shows the commands to run where it is")
    log(f"$ {shlex.join(command)}")
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else 2, text=True, check=False)
    if done.returncode:
        raise HoldfastError(f"{command[0]} failed with code {done.returncode}; its message is above")
    return done.stdout or ""

"""The container image: Docker builds it, Enroot imports it into the squash file that Pyxis starts.

The invariant: a `.sqsh` file is a complete image, and the file beside it holds its digest. The import writes to a temporary name,
and is skipped if the digest is the same.
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


def checkout(given: Path | None = None) -> Path:
    """The build context: the given source tree, or the one that this program runs from."""
    root = given or Path(__file__).parents[3]
    if not (root / DOCKERFILE).exists():
        raise UsageError(f"{root} is not a checkout of Holdfast (it has no {DOCKERFILE}); give --context")
    return root


def build(tag: str, context: Path, base: str | None, efa: str | None, dry_run: bool) -> list[str]:
    """Builds the image and returns its tag; with `dry_run` returns the command."""
    values = {"BASE": base, "EFA_VERSION": efa}
    arguments = [word for name, value in values.items() if value for word in ("--build-arg", f"{name}={value}")]
    command = ["docker", "build", "--tag", tag, "--file", str(context / DOCKERFILE), *arguments, str(context)]
    if dry_run:
        return [shlex.join(command)]
    run(command)
    return [tag]


def import_image(tag: str, output: Path | None, dry_run: bool) -> list[str]:
    """Imports the Docker image into a squash file and returns its path; with `dry_run` returns the commands.

    A file of the same image is kept."""
    output = output or Path(os.environ.get("APPS_PATH", ".")) / "holdfast.sqsh"
    temporary = temporary_beside(output)
    inspect = ["docker", "image", "inspect", "--format", "{{.Id}}", tag]
    command = ["enroot", "import", "--output", str(temporary), f"dockerd://{tag}"]
    record = output.with_name(f"{output.name}.digest")
    if dry_run:
        return [shlex.join(words) for words in (inspect, command, ["mv", str(temporary), str(output)])]
    digest = run(inspect, capture=True).strip()
    if output.exists() and record.exists() and record.read_text().strip() == digest:
        log(f"{output} already holds {digest}")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            run(command)
            rename_into_place(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
        publish_text(record, digest + "\n")
    return [str(output)]


def run(command: list[str], capture: bool = False) -> str:
    """Runs a program with its output on stderr, or returns its output (`capture`)."""
    if shutil.which(command[0]) is None:
        raise HoldfastError(f"{command[0]} is not installed here; --dry-run prints the commands to run elsewhere")
    log(f"$ {shlex.join(command)}")
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else 2, text=True, check=False)
    if done.returncode:
        raise HoldfastError(f"{command[0]} failed with code {done.returncode}; its message is above")
    return done.stdout or ""

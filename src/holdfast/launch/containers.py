"""The container of a Slurm job: its image, and the folders that are mounted inside.

The invariant: every path of the job names the same file inside the container as outside, or the job is refused before it is
submitted.
"""

import os
from dataclasses import replace
from pathlib import Path

from holdfast.launch.options import SlurmOptions
from holdfast.system.errors import HoldfastError, UsageError


def with_container(options: SlurmOptions, paths: dict[str, str]) -> SlurmOptions:
    """Fills in image and mounts from $IMAGE, $APPS_PATH and $DATA_PATH; without an image nothing changes."""
    image = options.container_image or os.environ.get("IMAGE") or image_in_apps()
    if image is None:
        if options.container_mounts:
            raise UsageError("--container-mounts needs --container-image")
        return options
    if image.startswith((".", "/")):
        if not Path(image).exists():
            raise HoldfastError(f"{image}: no such image; create it with `holdfast launch image import`")
        image = os.path.abspath(image)  # the job may be submitted again from another folder
    mounts = options.container_mounts or default_mounts(paths)
    targets = [Path(part.split(":")[1] if ":" in part else part) for part in mounts.split(",")]
    for key, path in paths.items():
        if not any(Path(path).is_relative_to(target) for target in targets):
            raise UsageError(
                f"{key} = {path} is not mounted in the container; add {Path(path).parent} to --container-mounts"
            )
    return replace(options, container_image=image, container_mounts=mounts)


def image_in_apps() -> str | None:
    image = Path(os.environ.get("APPS_PATH", "/nonexistent")) / "holdfast.sqsh"
    return str(image) if image.exists() else None


def default_mounts(paths: dict[str, str]) -> str:
    """The folder of each path, and $DATA_PATH, each mounted under its own name. A folder inside another needs no mount."""
    folders = {Path(path) if key == "save" else Path(path).parent for key, path in paths.items()}
    if "DATA_PATH" in os.environ:
        folders.add(Path(os.environ["DATA_PATH"]).absolute())
    outermost = [f for f in folders if not any(f != other and f.is_relative_to(other) for other in folders)]
    return ",".join(f"{folder}:{folder}" for folder in sorted(outermost))

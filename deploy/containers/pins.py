"""Prints the pinned requirements of the image: what pyproject.toml asks for, at the versions of requirements.txt.

torch and numpy stay those of the base image, which were built for each other. The build backend comes along, because the
package itself is installed without network access.
"""

import re
import tomllib
from pathlib import Path

OF_THE_BASE = {"torch", "numpy"}


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["build-system"]["requires"]
    wanted = {name_of(requirement) for requirement in asked} - OF_THE_BASE
    lines = [line for line in Path("requirements.txt").read_text().splitlines() if "==" in line]
    pins = {name_of(line): line for line in lines}
    if missing := sorted(wanted - pins.keys()):
        raise SystemExit(f"requirements.txt pins no version of {', '.join(missing)}")
    print("\n".join(pins[name] for name in sorted(wanted)))


if __name__ == "__main__":
    main()

"""Starting the keeper: a process of its own session, which a signal to the trainers' process group does not reach."""

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.snapshot.place import Place, keeper_alive, open_private

START_SECONDS = 60.0


def start_keeper(place: Place, wait: bool = True) -> None:
    """Sees to it that the run has a keeper on this node; whoever comes first starts it, a second one leaves at once."""
    if keeper_alive(place):
        return
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    # No relative entry, and -P: a folder that the keeper happens to work in must not provide modules.
    given = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *given])
    environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MALLOC_ARENA_MAX="2")
    with open(place.path / "keeper.log", "ab", opener=open_private) as log:
        # a parent that leaves at once makes the keeper nobody's child: no zombie in the trainer, whatever happens to it
        subprocess.run(
            [
                sys.executable,
                "-SP",
                "-c",
                _FORK,
                sys.executable,
                "-P",
                "-m",
                "holdfast.snapshot.keeper",
                str(place.path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while wait and not keeper_alive(place):
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"the keeper did not start within {START_SECONDS:.0f} s; see {place.path / 'keeper.log'}"
            )
        time.sleep(0.02)


_FORK = "import os, sys\nif os.fork() == 0:\n    os.execv(sys.argv[1], sys.argv[1:])"

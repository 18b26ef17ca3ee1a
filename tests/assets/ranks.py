"""Many light processes that fetch one URL at once; run as a script, so that the forks come from a process without threads.

usage: ranks.py URL COUNT reap|zombie [TIMEOUT]. Every rank writes one JSON line. The parent reaps its children, or leaves the
dead as zombies until its standard input ends.
"""

import json
import os
import sys
from pathlib import Path

from holdfast.assets.fetching import fetch
from holdfast.system.errors import HoldfastError


def rank(number: int, url: str, timeout: float | None, start: int) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(number)
    os.read(start, 1)
    try:
        path = fetch(url, timeout=timeout)
        answer = {"rank": number, "pid": os.getpid(), "path": str(path), "size": len(Path(path).read_bytes())}
    except HoldfastError as error:
        answer = {"rank": number, "pid": os.getpid(), "error": str(error)}
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    url, count, mode, *rest = sys.argv[1:]
    start, trigger = os.pipe()
    for number in range(int(count)):
        if os.fork() == 0:
            os.close(trigger)
            rank(number, url, float(rest[0]) if rest else None, start)
            os._exit(0)
    os.close(trigger)
    if mode == "zombie":
        sys.stdin.read()
    for _ in range(int(count)):
        os.wait()


if __name__ == "__main__":
    main()

"""Running an iterator ahead in a thread, for sources whose reading is slow and releases the GIL (decompression, pipes)."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def prefetched(items: Iterator[Item], depth: int = 2) -> Iterator[Item]:
    """The items in order, at most `depth` of them made ahead. Ends its thread when the consumer stops early."""
    ready: queue.Queue[object] = queue.Queue(depth)
    stopped = threading.Event()

    def put(item: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def run() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(_END)
        except BaseException as error:
            put(error)

    threading.Thread(target=run, name="prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]
    finally:
        stopped.set()

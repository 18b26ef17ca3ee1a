"""Running an iterator ahead in a thread, for sources whose reading is slow and releases the GIL (decompression, pipes)."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


AHEAD_BYTES = 16 << 20


def prefetched(items: Iterator[Item], item_bytes: int) -> Iterator[Item]:
    """The items in order, of about `item_bytes` each, made some way ahead. Ends its thread when the consumer stops early."""
    depth = max(2, AHEAD_BYTES // max(item_bytes, 1))
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

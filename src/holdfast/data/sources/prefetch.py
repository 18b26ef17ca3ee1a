"""Units that one reader brings, ahead in a thread: for input that workers cannot read from any place in it.

Reading it (decompression, pipes) is slow and releases the GIL; the units carry what was read.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

from holdfast.data.sources import InputFile, Unit
from holdfast.data.sources.compressed import open_stream

Item = TypeVar("Item")
_END = object()
AHEAD_BYTES = 16 << 20
SIGNAL_SECONDS = 0.5
"""A wait without a limit can miss a Ctrl-C that arrives as it begins: the main thread then sleeps until the next signal."""


def fed_units(file: InputFile, unit_bytes: int, ends: Sequence[bytes]) -> Iterator[Unit]:
    """Units of at least `unit_bytes`, cut behind the last of the marks (`ends`) that end a document."""
    return prefetched(_read_units(file, unit_bytes, ends), unit_bytes)


def _read_units(file: InputFile, unit_bytes: int, ends: Sequence[bytes]) -> Iterator[Unit]:
    held, searched, number, before = bytearray(), 0, 0, 0

    def unit(size: int, position: int) -> Unit:
        weight = position - before
        return Unit(file.number, file.path, file.source, "fed", number, number + 1, 0, weight, bytes(held[:size]))

    with open(file.path, "rb") as stream:
        for piece in open_stream(stream, file.compression, file.path):
            held += piece
            if len(held) < unit_bytes:
                continue
            cuts = [at + len(mark) for mark in ends if (at := held.rfind(mark, searched)) >= 0]
            if cuts:
                at = stream.tell()
                yield unit(max(cuts), at)
                del held[: max(cuts)]
                number, before = number + 1, at
            # What is left holds no mark, but may hold the beginning of one.
            searched = max(0, len(held) - max(map(len, ends)))
        if held:
            yield unit(len(held), file.size)


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
        while True:
            try:
                item = ready.get(timeout=SIGNAL_SECONDS)
            except queue.Empty:
                continue
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item  # type: ignore[misc]
    finally:
        stopped.set()

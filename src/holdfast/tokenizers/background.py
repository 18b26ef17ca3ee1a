"""Work that goes on in a thread, which ends with the program, and is asked for its result later."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(threading.Thread, Generic[T]):
    """Not a Future: loading those takes a noticeable part of a start."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        self.join()
        if self._error is not None:
            raise self._error
        return self._result

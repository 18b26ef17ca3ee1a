"""One thread that owns a slot engine: the event loop sends it requests and cancellations, it sends back tokens.

The engine is not thread-safe; nothing else touches it. The event loop owns `load` and the open generations; the thread
only maps engine ids to generations. The invariant: every sequence that was submitted is counted in `load` until the engine has
reported its end, so that a cancelled request frees its place exactly once.
"""

import asyncio
import gc
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from holdfast.generation.requests import Emission, GenerationRequest
from holdfast.generation.slots import SlotEngine
from holdfast.serve.api_errors import ApiError, invalid
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

News = tuple[int, Emission]
JOIN_SECONDS = 30.0


class Generation:
    """The sequences of one HTTP request. `streamed`: the reader gets each token; otherwise only the end."""

    def __init__(self, requests: Sequence[GenerationRequest], streamed: bool) -> None:
        self.requests, self.open, self.cancelled = requests, len(requests), False
        self.ids: list[int] = []
        self.first_token: float | None = None
        """When the first token arrived, on the clock of time.monotonic."""
        self._streamed, self._news = streamed, list[News]()
        self._ready = asyncio.Event()
        self._error: ApiError | None = None

    def receive(self, number: int, emission: Emission) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()
        self._news.append((number, emission))
        self.open -= emission.finish_reason is not None
        if self._streamed or not self.open:
            self._ready.set()

    def fail(self, error: ApiError) -> None:
        self._error, self.open = error, 0
        self._ready.set()

    async def news(self) -> list[News]:
        """All tokens since the last call; waits for the next, or for the last one of a request that is not streamed."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news


class EngineThread:
    """Runs an engine in its own thread. Only the event loop calls its public methods."""

    def __init__(self, build: Callable[[], SlotEngine], max_queue: int) -> None:
        self._build = build
        engine = build()
        self._engine: SlotEngine | None = engine
        """Only the thread uses it. None while the next one is built after a failure."""
        self._length, self._vocabulary, self.slots = engine.length, engine.vocabulary, engine.slots
        self._capacity = self.slots + max_queue
        self._commands: queue.SimpleQueue[Callable[[SlotEngine], None] | None] = queue.SimpleQueue()
        self._running: dict[int, tuple[Generation, int]] = {}
        self._open: set[Generation] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.load = 0
        """Sequences in slots or waiting for one."""
        self.failure: str | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def submit(self, requests: Sequence[GenerationRequest], streamed: bool) -> Generation:
        """Queues the sequences of one HTTP request; refuses them if they do not fit or the queue is full."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.failure}; restart the server")
        try:
            for request in requests:
                request.check(self._length, self._vocabulary)
        except HoldfastError as error:
            raise invalid(str(error)) from None
        if len(requests) > self._capacity:
            raise invalid(
                f"the request asks for {len(requests)} texts; this server accepts at most {self._capacity}", "n"
            )
        if self.load + len(requests) > self._capacity:
            raise ApiError(429, "the queue is full; retry later", code="queue_full")
        generation = Generation(requests, streamed)
        self._open.add(generation)
        self.load += len(requests)
        self._commands.put(partial(self._begin, generation))
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends what is left of a generation; its slots are free after the next step."""
        if generation.open and not generation.cancelled:
            generation.cancelled = True
            self._commands.put(partial(self._end, generation))

    def _run(self) -> None:
        """Serves until `stop`. An error ends the requests in the engine; a new engine serves those that wait."""
        while True:
            try:
                assert self._engine is not None
                return self._serve(self._engine)
            except Exception:
                log(f"the engine has failed:\n{traceback.format_exc()}")
            lost = {generation for generation, _ in self._running.values()}
            self._running.clear()
            self._call_loop(partial(self._fail, lost))
            # The memory of the old engine, whose recorded steps refer to it, must be free before the next one takes as much.
            self._engine = None
            gc.collect()
            try:
                self._engine = self._build()
            except Exception as error:
                self._call_loop(partial(self._give_up, f"{type(error).__name__}: {error}"))
                return None

    def _serve(self, engine: SlotEngine) -> None:
        # A full collection visits every object of torch and stops all streams meanwhile: those that are there now are left out.
        gc.freeze()
        try:
            while self._follow_commands(engine):
                news = [(*self._running[emission.id], emission) for emission in engine.step()]
                for _, _, emission in news:
                    if emission.finish_reason is not None:
                        del self._running[emission.id]
                if news:
                    self._call_loop(partial(self._spread, news))
        finally:
            gc.unfreeze()

    def _follow_commands(self, engine: SlotEngine) -> bool:
        """Executes the commands that have arrived; waits for one if the engine has no work. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)

    def _begin(self, generation: Generation, engine: SlotEngine) -> None:
        for number, request in enumerate(generation.requests):
            id = engine.submit(request)
            generation.ids.append(id)
            self._running[id] = (generation, number)

    def _end(self, generation: Generation, engine: SlotEngine) -> None:
        for id in generation.ids:
            # After a failure another generation can have the same id in the new engine.
            if id in self._running and self._running[id][0] is generation:
                engine.cancel(id)

    def _call_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _spread(self, news: list[tuple[Generation, int, Emission]]) -> None:
        for generation, number, emission in news:
            generation.receive(number, emission)
            if emission.finish_reason is not None:
                self.load -= 1
                if not generation.open:
                    self._open.discard(generation)

    def _fail(self, lost: set[Generation]) -> None:
        for generation in lost:
            self._open.discard(generation)
            self.load -= generation.open
            generation.fail(ApiError(500, "the engine has failed; the server's log has the details"))

    def _give_up(self, message: str) -> None:
        """No engine can be built; all requests are refused from now on."""
        self.failure = message
        self._fail(set(self._open))

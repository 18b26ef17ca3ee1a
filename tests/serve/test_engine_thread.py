"""A failure of the engine ends the requests in it, and only those."""

import asyncio
import threading
import weakref

import pytest

from holdfast.generation.loading import load_model
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.slots import SlotEngine
from holdfast.serve.api_errors import ApiError
from holdfast.serve.engine_thread import EngineThread, Generation
from tests.serve.conftest import write_gpt2

SECONDS = 60


async def finish_reasons(generation: Generation) -> list[str | None]:
    """Of a request that is not streamed: its news arrive together."""
    async with asyncio.timeout(SECONDS):
        news = await generation.news()
    return [emission.finish_reason for _, emission in news if emission.finish_reason]


def test_a_cancellation_from_before_a_failure_leaves_the_requests_of_the_new_engine_alone(tmp_path):
    loaded = load_model(write_gpt2(tmp_path))
    stepping, failing = threading.Event(), threading.Event()
    built: list[SlotEngine] = []

    def build() -> SlotEngine:
        built.append(SlotEngine(loaded, 2))
        if len(built) == 1:
            built[0].step = fail  # type: ignore[method-assign]
        return built[-1]

    def fail() -> None:
        stepping.set()
        assert failing.wait(SECONDS)
        raise RuntimeError("the device is lost")

    async def scenario() -> None:
        thread = EngineThread(build, 8)
        thread.start()
        lost = thread.submit([GenerationRequest((1, 2), 4)], streamed=False)
        assert await asyncio.to_thread(stepping.wait, SECONDS)
        kept = thread.submit([GenerationRequest((1, 2), 4)], streamed=False)
        thread.cancel(lost)
        failing.set()
        with pytest.raises(ApiError, match="the engine has failed"):
            await finish_reasons(lost)
        assert await finish_reasons(kept) == ["length"]
        assert (len(built), thread.load, thread.failure) == (2, 0, None)
        await thread.stop()

    asyncio.run(scenario())


def test_the_memory_of_a_failed_engine_is_free_before_the_next_one_is_built(tmp_path):
    loaded = load_model(write_gpt2(tmp_path))
    built: list[weakref.ref[SlotEngine]] = []

    def build() -> SlotEngine:
        assert all(engine() is None for engine in built)
        engine = SlotEngine(loaded, 2)
        built.append(weakref.ref(engine))

        def fail() -> None:
            raise RuntimeError(f"{engine.queued} requests are lost")  # refers to the engine, as a recorded step does

        if len(built) == 1:
            engine.step = fail  # type: ignore[method-assign]
        return engine

    async def scenario() -> None:
        thread = EngineThread(build, 8)
        thread.start()
        with pytest.raises(ApiError, match="the engine has failed; the server's log"):
            await finish_reasons(thread.submit([GenerationRequest((1, 2), 4)], streamed=False))
        assert await finish_reasons(thread.submit([GenerationRequest((1, 2), 4)], streamed=False)) == ["length"]
        assert (len(built), thread.load, thread.failure) == (2, 0, None)
        await thread.stop()

    asyncio.run(scenario())

"""The HTTP interface: routes, error responses, start and stop of the server's threads."""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from holdfast.serve.access import Access, error_response
from holdfast.serve.api_errors import ApiError, invalid
from holdfast.serve.completions import TextAnswer, until_gone
from holdfast.serve.counters import Counters
from holdfast.serve.fields import Fields
from holdfast.serve.served_models import BERTService, GPTService, Service
from holdfast.serve.text_requests import MAX_INPUTS, TextRequest, read_chat, read_completion, read_prompts

# The playground loads nothing from elsewhere, and no other page may frame it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
PAGE_FILES = {
    "/": ("playground.html", "text/html; charset=utf-8"),
    "/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/playground.css": ("playground.css", "text/css; charset=utf-8"),
}


class Server:
    """The models, and a handler for each path."""

    def __init__(self, services: Mapping[str, Service], *, request_timeout: float) -> None:
        self._services, self._timeout = services, request_timeout
        self._counters, self._created = Counters(), int(time.time())

    def app(self, api_key: str | None, allowed_hosts: Collection[str]) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            *(Route(path, self.page, methods=["GET"]) for path in PAGE_FILES),
        ]
        access = Middleware(Access, api_key=api_key, allowed_hosts=allowed_hosts, count=self._count_refused)
        return Starlette(
            routes=routes,
            middleware=[access],
            exception_handlers={
                ApiError: self._refuse,
                HTTPException: self._refuse,
                ClientDisconnect: self._refuse,
                Exception: self._fail,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for service in self._services.values():
            service.start()
        yield
        for service in self._services.values():
            await service.stop()

    def _count_refused(self, status: int) -> None:
        self._counters.add("requests", path="other", status=str(status))

    async def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # the client is gone
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}")
        assert isinstance(error, ApiError)
        self._counters.add("requests", path=_known_path(request), status=str(error.status))
        return error_response(error)

    async def _fail(self, request: Request, error: Exception) -> Response:
        """A defect of the server; its traceback goes to the log."""
        self._counters.add("requests", path=_known_path(request), status="500")
        return error_response(ApiError(500, "internal error; the server's log has the details"))

    def _answer(self, request: Request, content: Any) -> Response:
        self._counters.add("requests", path=_known_path(request), status="200")
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        return Response(body, media_type="application/json")

    def _service(self, name: str | None) -> Service:
        if name is None:
            return next(iter(self._services.values()))
        if name not in self._services:
            known = ", ".join(self._services)
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )
        return self._services[name]

    async def completions(self, request: Request) -> Response:
        return await self._text(request, read_completion(await request.body()), chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._text(request, read_chat(await request.body()), chat=True)

    async def _text(self, request: Request, wanted: TextRequest, *, chat: bool) -> Response:
        service = self._service(wanted.model)
        if not isinstance(service, GPTService):
            raise invalid(
                f"the model {service.name} is a BERT model, which does not generate text; use /v1/embeddings", "model"
            )
        answer = TextAnswer(service, wanted, self._counters, chat=chat)
        deadline = self._deadline()
        async with self._before(deadline):
            await answer.submit()
        if wanted.stream:
            self._counters.add("requests", path=_known_path(request), status="200")
            return EventStream(answer, deadline)
        try:
            async with self._before(deadline):
                body = await until_gone(asyncio.create_task(answer.whole()), asyncio.create_task(_disconnect(request)))
        finally:
            answer.cancel()
        if body is None:
            raise ClientDisconnect()
        return self._answer(request, body)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    @contextlib.asynccontextmanager
    async def _before(self, deadline: float) -> AsyncIterator[None]:
        """Ends the work inside at the deadline, with 504."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise ApiError(504, f"the answer was not complete within {self._timeout:g} s (--request-timeout)") from None

    async def embeddings(self, request: Request) -> Response:
        fields = Fields(await request.body())
        service = self._service(fields.text("model"))
        if not isinstance(service, BERTService):
            raise invalid(
                f"the model {service.name} is a GPT model, which has no embeddings; use /v1/completions", "model"
            )
        inputs = read_prompts(fields.take("input"), "input", MAX_INPUTS)
        form = fields.text("encoding_format", "float")
        if form not in ("float", "base64"):
            raise invalid("encoding_format must be float or base64", "encoding_format")
        fields.unsupported(["dimensions"])
        fields.finish()
        async with self._before(self._deadline()):
            vectors, tokens = await service.embed(inputs)
        self._counters.add("prompt_tokens", tokens, model=service.name)
        data = [
            {"object": "embedding", "index": index, "embedding": _encode(vector) if form == "base64" else vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return self._answer(request, {"object": "list", "data": data, "model": service.name, "usage": usage})

    async def models(self, request: Request) -> Response:
        data = [self._description(service) for service in self._services.values()]
        return self._answer(request, {"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return self._answer(request, self._description(self._service(request.path_params["name"])))

    def _description(self, service: Service) -> dict[str, Any]:
        names = {"id": service.name, "object": "model", "created": self._created, "owned_by": "holdfast"}
        return names | {"max_model_len": service.max_positions, "capabilities": service.capabilities}

    async def health(self, request: Request) -> Response:
        failed = [service.name for service in self._services.values() if service.failure is not None]
        if failed:
            raise ApiError(503, f"the engine of {', '.join(failed)} has failed; restart the server")
        return self._answer(request, {"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        gauges = []
        for place, name in enumerate(("running", "waiting")):
            what = f"Sequences {('in slots', 'that wait for a slot')[place]}"
            gauges += [(f"holdfast_{name}", what, one.name, one.load[place]) for one in self._services.values()]
        return PlainTextResponse(self._counters.render(gauges), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        name, kind = PAGE_FILES[request.scope["path"]]  # request.url would depend on the Host header
        headers = {
            "Content-Security-Policy": PAGE_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(files("holdfast.serve").joinpath(name).read_bytes(), headers=headers, media_type=kind)


class EventStream(StreamingResponse):
    """The events of an answer. Its slots are free when the response ends, also if the client leaves before the first event."""

    def __init__(self, answer: TextAnswer, deadline: float) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_until(deadline, answer), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def _until(deadline: float, answer: TextAnswer) -> AsyncIterator[bytes]:
    """The events of an answer; an error event ends them at the deadline."""
    events = answer.stream()
    try:
        while True:
            async with asyncio.timeout_at(deadline):
                event = await anext(events)
            yield event
    except StopAsyncIteration:
        pass
    except TimeoutError:
        yield b"data: " + orjson.dumps(ApiError(504, "the text was not complete in time").body()) + b"\n\n"
    finally:
        await events.aclose()


async def _disconnect(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _encode(vector: list[float]) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def _known_path(request: Request) -> str:
    """The path of the route, for a label with few values."""
    route = request.scope.get("route")
    return str(getattr(route, "path", "other"))

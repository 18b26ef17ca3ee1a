"""Many clients at once: every answer is the one that the request gets alone, and clients that go away free their slots."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from holdfast.generation.slots import SlotEngine
from holdfast.serve.app import Server
from holdfast.serve.served_models import load_service
from tests.serve.conftest import serving, write_gpt2

CLIENTS = 200
PATIENCE_SECONDS = 60.0


def options_of(number):
    prompts = ["the quick", "a", "the lazy dog jumps over the other dogs and", "return self.value if"]
    sampling = {"temperature": (0, 0.8, 1.2)[number % 3], "seed": number}
    return {
        "model": "gpt2-tiny",
        "prompt": f"{prompts[number % 4]} {number % 7}",
        "max_tokens": 4 + number % 6,
        **sampling,
    }


async def ask(client, options, stream):
    if not stream:
        return (await client.completions.create(**options)).choices[0].text
    pieces = [e.choices[0].text async for e in await client.completions.create(**options, stream=True)]
    return "".join(pieces)


def test_200_clients_get_the_answers_that_each_would_get_alone(server):
    async def run():
        limits = httpx.Limits(max_connections=CLIENTS)
        http = httpx.AsyncClient(limits=limits, timeout=120)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http
        ) as client:
            alone = [await ask(client, options_of(number), False) for number in range(CLIENTS)]
            together = await asyncio.gather(*(ask(client, options_of(n), n % 2) for n in range(CLIENTS)))
        return alone, list(together)

    alone, together = asyncio.run(run())
    assert together == alone
    assert len(set(alone)) > CLIENTS / 2
    assert load(server) == 0


@pytest.fixture(scope="module")
def narrow(gpt2_folder):
    """A server with two slots and room for two that wait."""
    with serving(gpt2_folder, slots=2, max_queue=2) as running:
        yield running


LONG = {"prompt": "the quick", "max_tokens": 2000, "temperature": 0}


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def counter(server, name):
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith(f"holdfast_{name}{{"))


def load(server):
    return server.gauge("running", "gpt2-tiny") + server.gauge("waiting", "gpt2-tiny")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_free_their_slots_and_their_places_in_the_queue(narrow, stream):
    """Four long texts fill slots and queue; all clients leave; a new request runs long before they would have ended."""

    async def run():
        async with httpx.AsyncClient(base_url=narrow.url, timeout=60) as client:
            tasks = [
                asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": stream})) for _ in range(4)
            ]
            while load(narrow) < 4:
                await asyncio.sleep(0.02)
            full = await client.post("/v1/completions", json=LONG)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return full

    full = asyncio.run(run())
    assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
    assert int(full.headers["retry-after"]) > 0
    wait_for(lambda: load(narrow) == 0)
    with narrow.client() as client:
        assert client.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
    assert counter(narrow, "cancelled_requests_total") >= 4


def test_clients_that_leave_before_the_first_byte_free_their_slots(server, monkeypatch):
    """They close the connection as soon as the request is sent; no slot writes their texts to the end."""
    step = SlotEngine.step
    monkeypatch.setattr(SlotEngine, "step", lambda engine: time.sleep(0.005) or step(engine))
    address = server.url.removeprefix("http://").split(":")
    before = counter(server, "generated_tokens_total")
    for number in range(40):
        body = json.dumps(LONG | {"stream": bool(number % 2)}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((address[0], int(address[1])), timeout=20) as connection:
            connection.sendall(head.encode() + body)
    wait_for(lambda: load(server) == 0)
    assert counter(server, "generated_tokens_total") - before < 5 * LONG["max_tokens"]


def test_a_client_that_leaves_before_its_stream_begins_is_cancelled(gpt2_folder):
    """The disconnection is there when the response starts, so that no event is ever asked for."""
    body = json.dumps(LONG | {"stream": True}).encode()
    arrived = iter([{"type": "http.request", "body": body, "more_body": False}])
    version = {"version": "3.0", "spec_version": "2.3"}  # uvicorn's
    scope = {"type": "http", "asgi": version, "http_version": "1.1", "method": "POST", "path": "/v1/completions"}
    scope |= {"headers": [(b"host", b"localhost")], "query_string": b"", "scheme": "http", "root_path": ""}

    async def receive():
        return next(arrived, {"type": "http.disconnect"})

    async def send(message):
        pass

    async def run():
        service = load_service(str(gpt2_folder), "gpt2-tiny", slots=1, max_queue=0, tokenizer={})
        app = Server({"gpt2-tiny": service}, request_timeout=60).app(None, ())
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport) as client:
            await app(scope, receive, send)
            return (await client.get("http://localhost/metrics")).text

    assert 'holdfast_cancelled_requests_total{model="gpt2-tiny"} 1\n' in asyncio.run(run())


def test_an_error_in_the_engine_ends_its_requests_and_not_the_server(narrow, monkeypatch):
    step, calls = SlotEngine.step, iter(range(1 << 30))
    monkeypatch.setattr(SlotEngine, "step", lambda engine: 1 / 0 if next(calls) == 3 else step(engine))
    with narrow.client() as client:
        answer = client.post("/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert client.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
        assert client.get("/health").status_code == 200 and load(narrow) == 0


def test_more_texts_than_the_server_can_ever_hold_are_a_mistake_and_not_a_reason_to_retry(narrow):
    with narrow.client() as client:
        answer = client.post("/v1/completions", json=LONG | {"n": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_a_request_that_takes_too_long_ends_with_504_and_a_stream_with_an_error(gpt2_folder):
    """One slot writes 100 texts of 2,000 tokens; none of them is complete within a second."""
    with serving(gpt2_folder, slots=1, max_queue=300, request_timeout=1) as server, server.client() as client:
        whole = client.post("/v1/completions", json=LONG | {"n": 100})
        streamed = client.post("/v1/completions", json=LONG | {"n": 100, "stream": True})
        assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")
        *_, last, empty = streamed.text.split("\n\n")
        assert '"type":"timeout_error"' in last and not empty
        wait_for(lambda: load(server) == 0)


def test_the_time_of_a_request_includes_its_chat_template_and_embeddings_have_it_too(bert_folder, tmp_path):
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    folder = write_gpt2(tmp_path / "gpt2-tiny", endless, positions=64)
    with serving(folder, bert_folder, request_timeout=0.01) as server, server.client() as client:
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        texts = client.post("/v1/embeddings", json={"model": "bert-tiny", "input": ["the lazy dog"] * 2000})
        for answer in (chat, texts):
            assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
        assert client.get("/health").status_code == 200

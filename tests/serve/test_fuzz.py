"""5,000 random requests, most of them wrong: no answer is a 500, every error has OpenAI's shape, the server stays up."""

import asyncio
import json
import random

import httpx
import pytest

from tests.serve.conftest import serving, write_gpt2

REQUESTS, AT_ONCE = 5000, 32
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, -0.5, 1.0, 1e-300, 1e308),
    *("", "a", "the", "\u0000", "\U0001f600", "\u00fc" * 50, "<|endoftext|>", "[MASK]", "x" * 5000),
    *("gpt2-tiny", "bert-tiny", "float", "base64"),
    *([], [[]], [1], [1, 2, 3], [-1], [299, 300], ["a", "b"], [None], [1.5], ["a", 1]),
    *({}, {"a": 1}, {"type": "text"}, {"include_usage": True}),
    *([{"role": "user", "content": "hi"}], [{"role": 1}], [{"role": "user", "content": [{}]}]),
]
NAMES = [
    *("model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "repetition_penalty", "n", "best_of", "seed", "stop", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "echo", "suffix", "logit_bias", "presence_penalty", "tools", "response_format"),
    *("encoding_format", "dimensions", "user", "extra"),
]
GOOD = {
    "/v1/completions": {"model": "gpt2-tiny", "prompt": "the quick", "max_tokens": 3},
    "/v1/chat/completions": {"model": "gpt2-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/embeddings": {"model": "bert-tiny", "input": "a fox"},
}


def make(random_numbers):
    """A path and a body: a good request with a few fields replaced or removed, or with damaged bytes."""
    path = random_numbers.choice(list(GOOD))
    body = dict(GOOD[path])
    for _ in range(random_numbers.choice([0, 1, 1, 1, 2, 3, 6])):
        body[random_numbers.choice(NAMES)] = random_numbers.choice(VALUES)
    if random_numbers.random() < 0.1:
        body.pop(random_numbers.choice(list(body)))
    content = bytearray(json.dumps(body).encode())
    if random_numbers.random() < 0.15:
        for _ in range(random_numbers.randint(1, 5)):
            content[random_numbers.randrange(len(content))] = random_numbers.randrange(256)
    return path, bytes(content)


@pytest.mark.slow
def test_no_request_makes_the_server_fail(bert_folder, tmp_path):
    gpt2_folder = write_gpt2(tmp_path / "gpt2-tiny", positions=128)
    statuses = {}

    async def ask(client, requests):
        for path, body in requests:
            answer = await client.post(path, content=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (path, body, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, (body, answer.text)

    async def run(url):
        numbers = random.Random(20261116)
        requests = iter([make(numbers) for _ in range(REQUESTS)])
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(ask(client, requests) for _ in range(AT_ONCE)))
            assert (await client.get("/health")).status_code == 200

    with serving(gpt2_folder, bert_folder) as server:
        asyncio.run(run(server.url))
        assert server.gauge("running", "gpt2-tiny") == server.gauge("waiting", "gpt2-tiny") == 0
    assert statuses[200] > REQUESTS / 20 and statuses[400] > REQUESTS / 5, statuses

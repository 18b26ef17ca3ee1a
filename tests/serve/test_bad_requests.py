"""Requests that are wrong get a 4xx in OpenAI's shape, and the server goes on."""

import json
import socket

import pytest

from tests.serve.conftest import POSITIONS

COMPLETION = {"model": "gpt2-tiny", "prompt": "the quick", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "gpt2-tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
EMBEDDING = {"model": "bert-tiny", "input": "a fox"}

# Path, the fields that replace those of a good request, the parameter at fault.
WRONG = [
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": 7}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": ["a", 1]}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [True]}, "prompt"),
    ("completions", {"prompt": [10**9]}, "prompt"),
    ("completions", {"prompt": [1 << 80]}, "prompt"),
    ("completions", {"prompt": ["a"] * 129}, "prompt"),
    ("completions", {"prompt": [1] * POSITIONS}, "prompt"),
    ("completions", {"prompt": "fox " * 500_000}, "prompt"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": -5}, "max_tokens"),
    ("completions", {"max_tokens": "many"}, "max_tokens"),
    ("completions", {"max_tokens": 1.5}, "max_tokens"),
    ("completions", {"max_tokens": True}, "max_tokens"),
    ("completions", {"temperature": -0.1}, "temperature"),
    ("completions", {"temperature": 3}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"top_p": -1}, "top_p"),
    ("completions", {"top_k": -1}, "top_k"),
    ("completions", {"min_p": 2}, "min_p"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 1000}, "n"),
    ("completions", {"n": 128, "prompt": ["a", "b"]}, "n"),
    ("completions", {"best_of": 3}, "best_of"),
    ("completions", {"seed": 1 << 70}, "seed"),
    ("completions", {"seed": "x"}, "seed"),
    ("completions", {"stop": ["a"] * 17}, "stop"),
    ("completions", {"stop": ""}, "stop"),
    ("completions", {"stop": [3]}, "stop"),
    ("completions", {"stop": {"a": 1}}, "stop"),
    ("completions", {"stream": "yes"}, "stream"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"usage": 1}}, "stream_options"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"echo": True, "logprobs": 1}, "echo"),
    ("completions", {"logit_bias": {"5": 10}}, "logit_bias"),
    ("completions", {"presence_penalty": 1}, "presence_penalty"),
    ("completions", {"suffix": "end"}, "suffix"),
    ("completions", {"tempratur": 1}, "tempratur"),
    ("completions", {"model": 3}, "model"),
    ("completions", {"model": "bert-tiny"}, "model"),
    ("chat/completions", {"messages": None}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ["a"]}, "messages.0"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a", "name": 1}]}, "messages.0.name"),
    ("chat/completions", {"messages": [{"role": "user", "content": "fox " * 9000}]}, "messages"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"modalities": ["audio"]}, "modalities"),
    ("embeddings", {"input": ""}, None),
    ("embeddings", {"input": ["a"] * 200}, None),
    ("embeddings", {"input": ["a"] * 2049}, "input"),
    ("embeddings", {"input": []}, "input"),
    ("embeddings", {"input": [5000]}, "input"),
    ("embeddings", {"input": "fox " * 100}, "input"),
    ("embeddings", {"encoding_format": "xml"}, "encoding_format"),
    ("embeddings", {"dimensions": 3}, "dimensions"),
    ("embeddings", {"model": "gpt2-tiny"}, "model"),
]


def check_shape(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


def test_wrong_parameters_are_named(client):
    good = {"completions": COMPLETION, "chat/completions": CHAT, "embeddings": EMBEDDING}
    for path, wrong, param in WRONG:
        answer = client.post(f"/v1/{path}", json=good[path] | wrong)
        if param is None:
            assert answer.status_code == 200, (wrong, answer.text)
            continue
        assert check_shape(answer, 400)["param"] == param, (path, str(wrong)[:100], answer.text)
    for path, body in good.items():
        assert client.post(f"/v1/{path}", json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": 1e999}',
    ],
)
def test_what_is_no_json_object_is_refused(client, body):
    for path in ("completions", "chat/completions", "embeddings"):
        assert check_shape(client.post(f"/v1/{path}", content=body), 400)["type"] == "invalid_request_error"


def test_unknown_models_paths_and_methods(client):
    error = check_shape(client.post("/v1/completions", json=COMPLETION | {"model": "other"}), 404)
    assert error["code"] == "model_not_found" and "gpt2-tiny" in error["message"]
    check_shape(client.get("/v1/models/other"), 404)
    check_shape(client.get("/v1/engines"), 404)
    check_shape(client.get("/v1/completions"), 405)
    check_shape(client.get("/../../etc/passwd"), 404)


def test_a_body_that_is_too_large_is_refused_before_it_has_arrived(server, client):
    check_shape(client.post("/v1/completions", json=COMPLETION | {"prompt": "a" * (5 << 20)}), 413)

    def endless():
        yield b'{"prompt": "'
        for _ in range(80):
            yield b"a" * (1 << 16)

    check_shape(client.post("/v1/completions", content=endless()), 413)
    # A declared length is enough.
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_pages_of_other_sites_and_names_of_other_hosts_are_refused(client):
    check_shape(client.post("/v1/completions", json=COMPLETION, headers={"Host": "attacker.example"}), 403)
    check_shape(client.get("/", headers={"Host": "attacker.example:80"}), 403)
    for origin in (
        "http://attacker.example",
        "null",
        "http://localhost:1",
        "https://127.0.0.1",
        "http://[",
        "http://[x]",
    ):
        check_shape(client.post("/v1/completions", json=COMPLETION, headers={"Origin": origin}), 403)
    check_shape(client.get("/v1/models", headers={"Sec-Fetch-Site": "cross-site"}), 403)
    assert 'holdfast_requests_total{path="other",status="403"}' in client.get("/metrics").text
    own = str(client.base_url).rstrip("/")
    assert client.post("/v1/completions", json=COMPLETION, headers={"Origin": own}).status_code == 200
    for host in ("localhost", "127.0.0.1:9", "[::1]:8000"):
        assert client.get("/health", headers={"Host": host}).status_code == 200


def test_a_host_header_with_a_path_changes_no_path(client):
    for host in ("127.0.0.1/elsewhere", "localhost/?query"):
        assert client.get("/", headers={"Host": host}).text == client.get("/").text
        assert "GET /nowhere:" in check_shape(client.get("/nowhere", headers={"Host": host}), 404)["message"]


def test_null_means_unset_and_harmless_parameters_are_accepted(client):
    nothing = dict.fromkeys(("stop", "logit_bias", "suffix", "best_of", "seed", "stream_options", "top_p", "n"))
    accepted = nothing | {"user": "me", "logit_bias": {}, "presence_penalty": 0, "max_tokens": 2.0}
    answer = client.post("/v1/completions", content=json.dumps(COMPLETION | accepted))
    assert answer.status_code == 200, answer.text


def test_the_page_allows_nothing_from_elsewhere(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for path in ("/", "/playground.js", "/playground.css"):
        text = client.get(path).text
        assert "http://" not in text and "https://" not in text

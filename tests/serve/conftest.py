"""Real servers on loopback, as a process of `holdfast serve` or in a thread, and small models for them."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer
from tests.generation.conftest import write_bert

POSITIONS = 2048
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}\n{% endfor %}"
    "{% if messages[0]['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
START_SECONDS = 60


def write_gpt2(folder: Path, template: str | None = TEMPLATE, positions: int = POSITIONS) -> Path:
    """A Hugging Face folder with a random GPT-2 that never ends a greedy text, a tokenizer and a chat template."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    byte_level_tokenizer(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    config |= {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "unk")}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    torch.manual_seed(5)
    sizes = {"n_positions": positions, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary), bos_token_id=0, eos_token_id=0, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.transformer.wte.weight[vocabulary["<|endoftext|>"]] = 0
    model.save_pretrained(folder)
    return folder


@dataclass
class Running:
    url: str
    models: list[str]
    process: subprocess.Popen[str] | None = None
    stderr: IO[str] | None = None

    def log(self) -> str:
        """What the process has printed on stderr."""
        self.stderr.seek(0)
        return self.stderr.read()

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def gauge(self, name: str, model: str) -> float:
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(f'holdfast_{name}{{model="{model}"}}')]
        return float(line.split()[-1])

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_SECONDS)


def start(*arguments: str, **environment: str) -> Running:
    """A server on a free port; fails if it is not ready within a minute."""
    command = [sys.executable, "-m", "holdfast", "serve", *arguments, "--port", "0", "--json"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process is asked for its log)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ready = selector.select(START_SECONDS)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.wait()
        stderr.seek(0)
        pytest.fail(f"the server did not start:\n{stderr.read()}")
    return Running(**json.loads(line), process=process, stderr=stderr)


@contextlib.contextmanager
def serving(*folders: Path, slots: int = 16, max_queue: int = 300, request_timeout: float = 60.0, **access):
    """The same server in a thread of this process, which has loaded torch already."""
    from holdfast.serve.app import Server
    from holdfast.serve.command import bind, http_server
    from holdfast.serve.served_models import load_service, service_names

    names = service_names(list(map(str, folders)))
    services = {
        name: load_service(str(folder), name, slots=slots, max_queue=max_queue, tokenizer={})
        for name, folder in zip(names, folders, strict=True)
    }
    access = {"api_key": None, "allowed_hosts": ()} | access
    server = http_server(Server(services, request_timeout=request_timeout).app(**access), 10)
    listener = bind("127.0.0.1", 0)
    host, port = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(f"http://{host}:{port}", names)
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
    assert not thread.is_alive()


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    return write_gpt2(tmp_path_factory.mktemp("serve") / "gpt2-tiny")


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("serve") / "bert-tiny", "bert")


@pytest.fixture(scope="session")
def server(gpt2_folder, bert_folder):
    with serving(gpt2_folder, bert_folder) as running:
        yield running

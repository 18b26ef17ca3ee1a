"""The verb `serve`."""

import ipaddress
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.command_line.flags import positional
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.system.progress import log
from holdfast.tokenizers.options import TokenizerOptions

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

KEY_VARIABLE = "HOLDFAST_API_KEY"
# Connections at a time; beyond them the server answers 503.
MAX_CONNECTIONS = 2048
# Longer than clients keep an idle connection (httpx: 5 s): a server that closes it first breaks the request on its way.
KEEP_ALIVE_SECONDS = 75


@dataclass(frozen=True, kw_only=True)
class ServeOptions(TokenizerOptions):
    """Serve a model over HTTP: OpenAI's API under /v1, and a playground at /.

    GPT models have /v1/completions and, with a chat template, /v1/chat/completions; BERT models have /v1/embeddings.
    The extra `serve` is needed: pip install 'holdfast[serve]'.

    Examples:

      holdfast serve runs/first
      holdfast serve first-hf second-hf --port 8080
      HOLDFAST_API_KEY=secret holdfast serve first-hf --host 0.0.0.0
    """

    HEADINGS: ClassVar[dict[str, str]] = {
        "host": "network",
        "slots": "limits",
        "vocab_file": "tokenizer",
        "json": "flags",
    }

    model: tuple[str, ...] = field(metadata=positional())
    """Hugging Face folder, run folder, checkpoint folder or Megatron checkpoint. Two models share the playground."""
    json: bool = False
    """Print the server's address and its models as one JSON object when it is ready."""
    host: str = "127.0.0.1"
    """Address to listen on. The default accepts connections of this machine only; 0.0.0.0 accepts those of other machines."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients send as `Authorization: Bearer KEY`. The variable HOLDFAST_API_KEY does the same and does not show
    in the list of processes."""
    without_api_key: bool = False
    """Accept connections of other machines without a key."""
    allowed_host: tuple[str, ...] = ()
    """Host names that clients may use for a server without a key, besides IP addresses and localhost."""
    slots: int | None = None
    """Texts that are generated at the same time. Unset: 64 on a GPU, 8 on a CPU."""
    max_queue: int = 256
    """Texts that may wait for a slot; beyond them the server answers 429."""
    request_timeout: float = 600.0
    """Seconds that a request may take."""
    drain_timeout: float = 30.0
    """Seconds to finish running requests after SIGTERM or Ctrl-C; no new ones are accepted."""


def serve_command(options: ServeOptions) -> None:
    api_key = _check(options)
    try:
        import starlette as starlette
        import uvicorn as uvicorn
    except ImportError as error:
        raise HoldfastError(f"holdfast serve needs the package {error.name}: pip install 'holdfast[serve]'") from None
    listener = bind(options.host, options.port)
    from holdfast.serve.app import Server
    from holdfast.serve.served_models import load_service, service_names

    services = {}
    for path, name in zip(options.model, service_names(options.model), strict=True):
        log(f"loading {path} ...")
        tokenizer = options.tokenizer_names()
        services[name] = load_service(path, name, slots=options.slots, max_queue=options.max_queue, tokenizer=tokenizer)
    app = Server(services, request_timeout=options.request_timeout).app(api_key, options.allowed_host)
    server = http_server(app, options.drain_timeout)
    _announce(options, listener, list(services))
    # uvicorn sends the signal that ended it once more; by then all requests are complete.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
    log("the server has stopped")


def http_server(app: "Starlette", drain_timeout: float) -> "uvicorn.Server":
    """uvicorn with its limits: plain HTTP/1.1, no trust in a proxy's headers, no log line per request."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
    return uvicorn.Server(config)


def _check(options: ServeOptions) -> str | None:
    """Refuses values out of range and an open server by mistake; returns the key."""
    bounds = {"port": (0, 65535), "max_queue": (0, 1 << 20), "request_timeout": (1, 1e6), "drain_timeout": (0, 1e6)}
    for name, (least, most) in bounds.items():
        if not least <= getattr(options, name) <= most:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: give {least:g} to {most:g}")
    if options.slots is not None and not 1 <= options.slots <= 1024:
        raise UsageError(f"--slots {options.slots}: give 1 to 1,024")
    key = options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and (not key.strip() or key != key.strip()):
        raise UsageError(f"the key (--api-key or {KEY_VARIABLE}) is empty, or begins or ends with a blank")
    if key is None and not options.without_api_key and not _is_loopback(options.host):
        raise UsageError(
            f"--host {options.host} lets other machines use the model: set {KEY_VARIABLE} (or --api-key), or give "
            "--without-api-key if the network is trusted"
        )
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket with its address; it does not listen before the models are loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # a name that is too long has no encoding
        raise UsageError(f"--host {host}: {getattr(error, 'strerror', None) or 'not a host name'}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise HoldfastError(
            f"cannot listen on {host}, port {port}: {error.strerror}; give another --port or --host"
        ) from None
    return listener


def _announce(options: ServeOptions, listener: socket.socket, models: list[str]) -> None:
    from holdfast.command_line.results import print_result

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    facts: dict[str, Any] = {"url": url, "models": models}
    print_result(facts, url, options.json, indent=False)
    log(f"serving {', '.join(models)}: playground at {url}/, OpenAI's API at {url}/v1; Ctrl-C stops")

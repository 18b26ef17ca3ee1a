"""The newest metrics for Prometheus: GET /metrics answers in its text format."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from holdfast.config import Config
from holdfast.train.trackers.sinks import Record, Sink, numbers


class PrometheusSink(Sink):
    """Serves on --metrics-host and --metrics-port while rank 0 trains."""

    name = "prometheus"

    def __init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None
        self._record: Record = {}

    def open(self, run: Path, config: Config, run_id: str | None) -> str:
        self._label = run.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        sink = self
        self.close(False)  # opened again after a failure

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                content = sink.text().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None: ...

        assert config.log.metrics_port is not None
        self._server = ThreadingHTTPServer((config.log.metrics_host, config.log.metrics_port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        print(
            f"metrics for Prometheus at http://{config.log.metrics_host}:{self._server.server_port}/metrics", flush=True
        )
        return ""

    def send(self, record: Record) -> None:
        self._record = record

    def text(self) -> str:
        """Every number of the newest record as a gauge, labelled with the name of the run folder."""
        values = {**numbers(self._record), **({"iteration": self._record["iteration"]} if self._record else {})}
        lines = []
        for key, value in values.items():
            lines += [f"# TYPE holdfast_{key} gauge", f'holdfast_{key}{{run="{self._label}"}} {value!r}']
        return "\n".join(lines) + "\n"

    def close(self, finished: bool) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

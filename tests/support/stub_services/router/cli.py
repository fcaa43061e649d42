"""Stands in for the router under `kvrelay up`: says that it serves and that all nodes are usable."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys

from common.config.cli import service_app
from common.config.service_configs import RouterConfig
from common.config.sources import Resolved


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"status": "ok", "prefill": 1, "decode": 1, "pooling": 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _stop(*_: object) -> None:
    print("bye", flush=True)
    os._exit(0)


def preload() -> None:
    """For the fork server."""


def _run(resolved: Resolved[RouterConfig]) -> None:
    signal.signal(signal.SIGTERM, _stop)
    print("hello", file=sys.stderr)
    http.server.HTTPServer((resolved.config.host, resolved.config.port), _Handler).serve_forever()


app = service_app(RouterConfig, help="A stub.", run=_run)

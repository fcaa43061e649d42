"""A stand-in for a server of the OpenAI API on a thread: every answer is a function of the request."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and the body: JSON, or the bytes of an event stream."""


@dataclass
class StubApi:
    """`asked` has (path, body) of every POST, in order of arrival."""

    url: str
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    key: str = ""
    """Without it, models are not listed."""


@contextlib.contextmanager
def stub_api(answer: Callable[[str, dict[str, Any]], Reply]) -> Iterator[StubApi]:
    """Serve `answer(path, body)`, and one model named m, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if stub.key and self.headers["authorization"] != f"Bearer {stub.key}":
                self._reply(401, {}, {"error": {"message": "no such key"}})
            else:
                self._reply(200, {}, {"object": "list", "data": [{"id": "m"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stub.asked.append((self.path, body))
            self._reply(*answer(self.path, body))

        def _reply(self, status: int, headers: dict[str, str], body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = StubApi(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""`kvrelay admin watch` while clusters come and go."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from common.base.process import start_ticks
from common.cluster.running_clusters import RunningCluster, announced, runtime_folder
from kvrelay.admin import watch as watching
from kvrelay.admin.cli import app

_ANSWERS = {
    "/status": {"requests_running": 0, "requests_waiting": 0, "requests_held_back": 0, "redis": "up"},
    "/nodes": {"nodes": []},
    "/requests": {"requests": []},
}


@contextlib.contextmanager
def admin_port(asked: list[str]) -> Iterator[str]:
    """The URL of a router's admin port, which notes the paths that it is asked for."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(_ANSWERS[self.path.partition("?")[0]]).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_second_cluster_does_not_end_the_watch_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("KVRELAY_ADMIN_URL", raising=False)
    first: list[str] = []
    second: list[str] = []
    folder = runtime_folder(os.environ)
    with contextlib.ExitStack() as stack:

        def start(pid: int, asked: list[str]) -> None:
            url = stack.enter_context(admin_port(asked))
            cluster = RunningCluster(pid, {f"http://127.0.0.1:{pid}": url}, "token", start_ticks(pid))
            stack.enter_context(announced(cluster, folder))

        start(os.getpid(), first)
        monkeypatch.setattr(watching.time, "sleep", lambda _: start(os.getppid(), second))
        shown = CliRunner().invoke(app, ["watch", "--count", "2"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("no request runs") == 2
    assert (len(first), second) == (6, [])

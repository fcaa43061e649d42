"""`kvrelay load run` before and after the run: wrong servers, unwritable results."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.tools.load import cli
from common.tools.load.cli import app
from common.tools.load.outcome import Outcome


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """URL of a server that sends `raw` to the first connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(raw)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def load(url: str, *args: str) -> tuple[int, str]:
    shown = CliRunner().invoke(
        app, ["run", "--url", url, "--concurrency", "1", "--requests", "1", "--timeout", "1", *args]
    )
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown.exit_code, shown.output


@pytest.mark.parametrize(
    "raw",
    [
        b"-ERR wrong number of arguments for 'get' command\r\n",  # Redis
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[[[[[[[[[",
        b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"data": ["one"]}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"data": [{}]}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
    ],
)
def test_server_of_another_protocol_lists_no_models(raw: bytes) -> None:
    with answering(raw) as url:
        code, output = load(url)
    assert code == 3, output
    assert "does not list models" in output


def test_malformed_address_lists_no_models() -> None:
    assert load("http://127.0.0.1:8x")[0] == 3


_MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"data": [{"id": "m" }]}'


@pytest.mark.parametrize("name", ["", "nowhere/run.json"])
def test_unwritable_results_are_reported_before_anything_is_sent(tmp_path: Path, name: str) -> None:
    with answering(_MODELS) as url:
        code, output = load(url, "--json", str(tmp_path / name))
    assert code == 2, output
    assert "cannot write" in output


def test_report_is_shown_even_if_the_results_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results"
    folder.mkdir()

    def run(*_: object) -> list[Outcome]:
        folder.rmdir()
        return [Outcome(0, 0.0, ended_s=1.0)]

    monkeypatch.setattr(cli, "run_load", run)
    with answering(_MODELS) as url:
        code, output = load(url, "--json", str(folder / "run.json"))
    assert code == 1, output
    assert "1 of 1 succeeded" in output
    assert "cannot write" in output

"""`kvrelay load` before and after runs: wrong servers, unwritable and unreadable results, usage."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.stub_api import stub_api
from typer.testing import CliRunner

from kvrelay.admin.client import AdminUnreachable
from kvrelay.load import cli
from kvrelay.load.cli import app
from kvrelay.load.measure import LoadRun, ask_server
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.results import read_result, run_result, write


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


def test_the_url_may_end_in_v1() -> None:
    with stub_api(lambda *_: (200, {}, {})) as stub:
        ready = ask_server(LoadPlan(url=stub.url + "/v1/", model=""))
    assert (ready.url, ready.model) == (stub.url, "m")


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

    def run(*_: object) -> LoadRun:
        folder.rmdir()
        return LoadRun([RequestOutcome(0, 0.0, ended_s=1.0)], interrupted=False)

    monkeypatch.setattr(cli, "measure", run)
    with answering(_MODELS) as url:
        code, output = load(url, "--json", str(folder / "run.json"))
    assert code == 1, output
    assert "1 of 1 succeeded" in output
    assert "cannot write" in output


def command(*args: str) -> tuple[int, str]:
    shown = CliRunner().invoke(app, args)
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown.exit_code, shown.output


def test_a_run_in_which_no_request_was_due_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measure", lambda *_: LoadRun([], interrupted=False))
    with answering(_MODELS) as url:
        code, output = command("run", "--url", url, "--rate", "0.001", "--duration", "1")
    assert code == 1, output
    assert "no request was due within --duration" in output


def test_a_sweep_whose_server_is_gone_writes_its_points_and_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> LoadRun:
        return LoadRun([RequestOutcome(0, 0.0, error="connection", ended_s=1.0)], interrupted=False)

    def refused(*_: object) -> None:
        raise AdminUnreachable("refused")

    monkeypatch.setattr(cli, "measure", run)
    monkeypatch.setattr(cli, "list_models", refused)
    with answering(_MODELS) as url:
        code, output = command("sweep", "--url", url, "--slo-ttft", "1", "--json", str(tmp_path / "sweep.json"))
    assert code == 3, output
    assert "the server was lost at 1 requests/s" in " ".join(output.split())
    assert len(read_result(tmp_path / "sweep.json")["points"]) == 1


@pytest.mark.parametrize("columns", ["", "0", "80"])
def test_results_are_compared_and_reported_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    plan = LoadPlan(url="http://x", model="m")
    outcomes = [RequestOutcome(n, n / 10, ended_s=n / 10 + 0.5, ttft_s=0.1, output_tokens=5) for n in range(30)]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in files:
        write(path, json.dumps(run_result(plan, [outcomes], (None, None), began=0.0)))
    page, compared = tmp_path / "page.html", tmp_path / "compared.json"
    code, output = command("compare", *map(str, files), "--html", str(page), "--json", str(compared))
    assert code == 0, output
    assert "time to first token, p99" in output
    assert "undecided" in output
    assert "<svg" in page.read_text()
    assert command("report", str(files[0]), str(page))[0] == 0
    assert "Load on m" in page.read_text()
    assert command("report", str(compared), str(page))[0] == 0


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"kind": "run"}', '{"kind": "other"}', "[" * 100_000])
def test_a_file_without_results_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    code, output = command("compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    assert code == 2, output
    assert "no results" in output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sweep"], "--slo-ttft"),
        (["sweep", "--slo-ttft", "1", "--rates", "1,fast"], "list of numbers"),
        (["sweep", "--slo-ttft", "1", "--rates", "1,-2"], "between 1e-06 and"),
        (["ab", "--concurrency", "1"], "--url-b"),
        (["run", "--turns", "2", "--trace", "x"], "--turns"),
    ],
)
def test_wrong_usage_is_named_before_anything_is_sent(args: list[str], words: str) -> None:
    code, output = command(*args)
    assert code == 2, output
    assert words in output


@pytest.mark.parametrize("value", ["nan", "inf", "1e308", "-1"])
@pytest.mark.parametrize("option", ["--rate", "--duration", "--timeout", "--burstiness", "--slo-ttft", "--think-time"])
def test_what_no_run_could_carry_out_is_refused(option: str, value: str) -> None:
    """A run with `--rate 1e308 --duration 1` or `--burstiness 1e308` never ended."""
    code, output = command("run", "--url", "http://127.0.0.1:1", option, value)
    assert (code, f"Invalid value for '{option}'" in output) == (2, True)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--rates", "1,1e300"), ("--highest-rate", "inf"), ("--precision", "nan"), ("--slo-tpot", "0")],
)
def test_a_sweep_that_could_not_end_is_refused(option: str, value: str) -> None:
    assert command("sweep", "--url", "http://127.0.0.1:1", "--slo-ttft", "1", option, value)[0] == 2

"""The command against a stand-in server; tests/integration/test_offline.py kills it against a real one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.stub_api import Reply, stub_api
from typer.testing import CliRunner, Result

from kvrelay.batch.cli import app


def write_batch(file: Path, count: int) -> None:
    lines = [
        {"custom_id": f"id-{index}", "method": "POST", "url": "/v1/completions", "body": {"prompt": f"{index}"}}
        for index in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def echo(path: str, body: dict[str, Any]) -> Reply:
    return 200, {"x-request-id": "r"}, {"text": body["prompt"]}


def run(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(app, ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *args])


def results(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


def test_every_request_has_its_result(tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl", 50)
    with stub_api(echo) as stub:
        result = run(tmp_path, "--url", stub.url, "--concurrency", "8")
    assert result.exit_code == 0, result.stderr
    assert "50 of 50 requests answered" in result.stderr
    found = results(tmp_path)
    assert {key: response["body"]["text"] for key, response in found.items()} == {f"id-{i}": f"{i}" for i in range(50)}


def test_only_what_has_no_result_is_asked_for_again(tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl", 10)
    with stub_api(echo) as stub:
        assert run(tmp_path, "--url", stub.url).exit_code == 0
        out = tmp_path / "out.jsonl"
        lines = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:6]) + lines[6][:-5])
        lost = {json.loads(line)["custom_id"] for line in lines[6:]}
        stub.asked.clear()
        again = run(tmp_path, "--url", stub.url)
        assert again.exit_code == 0
        assert "10 of 10 requests answered, 6 results from earlier runs" in again.stderr
        assert Counter(body["prompt"] for _, body in stub.asked) == Counter(key.removeprefix("id-") for key in lost)
        stub.asked.clear()
        assert run(tmp_path, "--url", stub.url).exit_code == 0
        assert not stub.asked
    assert len(results(tmp_path)) == 10


def test_a_refused_request_is_a_result_and_the_exit_code_says_so(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        return echo(path, body) if body["prompt"] != "3" else (400, {}, {"error": {"message": "no"}})

    write_batch(tmp_path / "in.jsonl", 5)
    with stub_api(answer) as stub:
        first = run(tmp_path, "--url", stub.url)
        again = run(tmp_path, "--url", stub.url)
    assert first.exit_code == again.exit_code == 1
    assert "4 of 5 requests answered" in first.stderr
    assert "1 failed" in again.stderr
    assert results(tmp_path)["id-3"]["status_code"] == 400


def test_a_refused_key_ends_the_batch_and_leaves_the_rest_for_later(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        return echo(path, body) if body["prompt"] != "2" else (401, {}, {"error": {"message": "no such key"}})

    write_batch(tmp_path / "in.jsonl", 5)
    with stub_api(answer) as stub:
        result = run(tmp_path, "--url", stub.url, "--concurrency", "1")
    assert result.exit_code == 1
    assert "refuses the API key" in result.stderr
    assert set(results(tmp_path)) == {"id-0", "id-1"}


def test_an_answer_that_is_not_json_is_a_result_and_the_batch_goes_on(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> Reply:
        return echo(path, body) if body["prompt"] != "1" else (307, {"location": "/v1/completions"}, b"moved")

    write_batch(tmp_path / "in.jsonl", 3)
    with stub_api(answer) as stub:
        result = run(tmp_path, "--url", stub.url, "--concurrency", "1")
    assert result.exit_code == 1
    assert "2 of 3 requests answered" in result.stderr
    error = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["error"]
    assert error["code"] == "not_an_api_answer"
    assert "answers 307" in error["message"]
    assert "moved" in error["message"]


def test_a_server_that_is_gone_ends_the_batch_and_leaves_the_rest_for_later(tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl", 5)
    with stub_api(echo) as stub:
        pass
    result = run(tmp_path, "--url", stub.url, "--attempts", "1")
    assert result.exit_code == 3
    assert "does not answer" in result.stderr
    assert results(tmp_path) == {}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "in.jsonl").write_text("{}\n"), "line 1"),
        (lambda folder: (folder / "out.jsonl").symlink_to(folder / "in.jsonl"), "must not be the input file"),
        (
            lambda folder: (folder / "out.jsonl").write_text('{"custom_id": "other", "response": null}\n'),
            "'other', which",
        ),
    ],
)
def test_wrong_files_are_refused_before_anything_is_sent(tmp_path: Path, prepare: Any, message: str) -> None:
    write_batch(tmp_path / "in.jsonl", 2)
    prepare(tmp_path)
    with stub_api(echo) as stub:
        result = run(tmp_path, "--url", stub.url)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert not stub.asked


def test_a_server_and_a_model_to_start_exclude_each_other(tmp_path: Path) -> None:
    write_batch(tmp_path / "in.jsonl", 1)
    result = run(tmp_path, "--url", "http://127.0.0.1:1", "--model", "demo")
    assert result.exit_code == 2
    assert not (tmp_path / "out.jsonl").exists()

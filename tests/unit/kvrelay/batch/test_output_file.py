from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from common.base.errors import DeadlineExceeded
from kvrelay.api_client import ApiAnswer
from kvrelay.batch import output_file
from kvrelay.batch.input_file import BadBatch
from kvrelay.batch.output_file import BatchFailed, OutputFile

GOOD = ApiAnswer(200, "r", {"choices": []})


def test_results_have_the_fields_of_openais_format(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with OutputFile(file) as output:
        output.add("a", GOOD)
        output.add("b", ApiAnswer(400, "s", {"error": {"message": "no"}}))
        output.add("c", DeadlineExceeded("late"))
    first, second, third = (json.loads(line) for line in file.read_text().splitlines())
    assert first.pop("id") != second.pop("id")
    response = {"status_code": 200, "request_id": "r", "body": {"choices": []}}
    assert first == {"custom_id": "a", "response": response, "error": None}
    assert second["response"]["status_code"] == 400
    assert (third["response"], third["error"]) == (None, {"code": "deadline_exceeded", "message": "late"})
    with OutputFile(file) as output:
        assert (output.finished, output.failed) == ({"a", "b", "c"}, 2)


def test_a_result_is_one_line_for_readers_who_end_lines_as_unicode_does(tmp_path: Path) -> None:
    file, body = tmp_path / "out.jsonl", {"text": "a\u2028b\u0085c"}
    with OutputFile(file) as output:
        output.add("a", ApiAnswer(200, "r", body))
    (line,) = file.read_text("utf-8").splitlines()
    assert json.loads(line)["response"]["body"] == body


@pytest.mark.parametrize("tail", [b"{", b'{"id":"batch_req_ab', b'{"id":"' + b"x" * 200_000, bytes(4096)])
def test_an_incomplete_last_line_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    """Also zeros, as some file systems leave them after a power failure."""
    file = tmp_path / "out.jsonl"
    with OutputFile(file) as output:
        output.add("a", GOOD)
    file.write_bytes(file.read_bytes() + tail)
    with OutputFile(file) as output:
        assert output.finished == {"a"}
        output.add("b", GOOD)
    assert [json.loads(line)["custom_id"] for line in file.read_text().splitlines()] == ["a", "b"]


def test_a_file_of_only_an_incomplete_line_is_empty_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(b'{"id"')
    with OutputFile(file) as output:
        assert not output.finished
    assert file.read_bytes() == b""


@pytest.mark.parametrize(
    "text", ["my notes\n", '{"precious": 1}', "notes\nmore", '{"custom_id": "a", "response": {"status_code": 200}}']
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(BadBatch, match="line 1 is not a result"):
        OutputFile(file)
    assert file.read_text() == text


def test_a_second_batch_on_the_same_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with OutputFile(file), pytest.raises(BadBatch, match="is being written by another batch"):
        OutputFile(file)
    with OutputFile(file):
        pass


def test_results_reach_the_disk_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    synced: list[int] = []
    monkeypatch.setattr(output_file.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(output_file.os, "fsync", synced.append)
    with OutputFile(tmp_path / "out.jsonl") as output:
        at_start = len(synced)
        for now_s in (0.1, 0.9):
            output.add(str(now_s), GOOD)
        assert len(synced) == at_start
        now_s = 1.1
        output.add("c", GOOD)
        assert len(synced) == at_start + 1
    assert len(synced) == at_start + 2


def test_a_full_disk_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with OutputFile(tmp_path / "out.jsonl") as output:
        monkeypatch.setattr(output_file.os, "write", full)
        with pytest.raises(BatchFailed, match="No space left"):
            output.add("a", GOOD)


def test_a_result_that_was_written_in_part_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ended just then added its line to the part, and the batch could never go on with its file."""
    write, room = os.write, 20

    def filling(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    with OutputFile(tmp_path / "out.jsonl") as output:
        monkeypatch.setattr(output_file.os, "write", filling)
        with pytest.raises(BatchFailed, match="No space left"):
            output.add("a", GOOD)
        room = 10**6
        output.add("b", GOOD)
    with OutputFile(tmp_path / "out.jsonl") as output:
        assert output.finished == {"b"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadBatch, match="cannot write"):
        OutputFile(tmp_path / "nowhere" / "out.jsonl")
    os.mkdir(tmp_path / "folder")
    with pytest.raises(BadBatch, match="cannot write"):
        OutputFile(tmp_path / "folder")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """`-o /dev/stdout` of a pipeline waited for ever, as the results of earlier runs were read from it."""
    path = Path("/dev/null")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(BadBatch, match="not a file"):
        OutputFile(path)


def test_a_file_system_that_cannot_sync_folders_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems cannot fsync a folder, and a folder that the user may not read cannot even be opened."""

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    with OutputFile(tmp_path / "out.jsonl") as output:
        output.add("a", ApiAnswer(200, "r", {}))
    assert output.finished == {"a"}

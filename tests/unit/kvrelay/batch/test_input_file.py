from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvrelay.batch.input_file import BadBatch, check_lines, read_lines


def line(custom_id: str, **changes: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}, **changes}
    )


def test_lines_are_read_in_order_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f"{line('a')}\n\n{line('b', url='/v1/chat/completions')}")
    assert [(each.custom_id, each.url) for each in read_lines(file)] == [
        ("a", "/v1/completions"),
        ("b", "/v1/chat/completions"),
    ]
    assert check_lines(file) == {"a", "b"}


def test_a_file_of_windows_editors_is_read(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(f"\ufeff{line('a')}\r\n\r\n{line('b')}\r\n".encode())
    assert check_lines(file) == {"a", "b"}
    file.write_bytes(f"{line('a')}\n\ufeff{line('b')}\n".encode())
    with pytest.raises(BadBatch, match="line 2"):
        check_lines(file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        (line(""), "line 2: custom_id"),
        (line("b", method="GET"), "line 2: method"),
        (line("b", url="http://elsewhere/v1/completions"), "line 2: url"),
        (line("b", url="/v1/../admin"), "line 2: url"),
        (line("b", body="text"), "line 2: body"),
        (line("b", body={"stream": True}), "line 2: body: a batch cannot be streamed"),
        (line("a"), "custom_id 'a' is there twice"),
    ],
)
def test_a_wrong_line_is_named_before_anything_starts(tmp_path: Path, wrong: str, message: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f"{line('a')}\n{wrong}\n")
    with pytest.raises(BadBatch, match=message):
        check_lines(file)


def test_a_pipe_is_refused_because_it_can_be_read_only_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, line("a").encode() + b"\n")
    os.close(writer)
    with open(reader, "rb"), pytest.raises(BadBatch, match="is a pipe"):
        check_lines(Path(f"/dev/fd/{reader}"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadBatch, match=r"cannot read .*nothing: No such file"):
        check_lines(tmp_path / "nothing")

"""The input of a batch in OpenAI's format: one request per line, read as a stream."""

from __future__ import annotations

import codecs
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from common.base.errors import KvRelayError

_MAX_ID = 512


class BadBatch(KvRelayError):
    """A file of the batch is malformed; nothing was started."""

    exit_code = 2


class BatchLine(BaseModel):
    """One request. `url`: path on the server."""

    model_config = ConfigDict(strict=True, extra="ignore")
    custom_id: str = Field(min_length=1, max_length=_MAX_ID)
    method: Literal["POST"]
    url: str = Field(pattern=r"^/v1/[\w/-]+$")
    body: dict[str, Any]

    @field_validator("body")
    @classmethod
    def _whole_answers_only(cls, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise ValueError("a batch cannot be streamed")
        return body


def read_lines(path: Path) -> Generator[BatchLine]:
    """The requests, one line in memory at a time. Blank lines are skipped.

    Raises: BadBatch naming the first wrong line, or for a pipe, which could not be read a second time.
    """
    try:
        with path.open("rb") as file:
            if not file.seekable():
                raise BadBatch(f"{path} is a pipe, and the input is read twice: save it to a file first")
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)  # as Windows' editors write it
                if line.strip():
                    yield _parse(line, f"{path}, line {number}")
    except OSError as error:
        raise BadBatch(f"cannot read {path}: {error.strerror}") from None


def check_lines(path: Path) -> set[str]:
    """Read the whole file once. Returns its custom_ids.

    Raises: BadBatch naming the first wrong line or repeated custom_id.
    """
    seen: set[str] = set()
    for line in read_lines(path):
        if line.custom_id in seen:
            raise BadBatch(f"{path}: custom_id {line.custom_id!r} is there twice")
        seen.add(line.custom_id)
    return seen


def _parse(line: bytes, place: str) -> BatchLine:
    try:
        return BatchLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise BadBatch(f"{place}: {where + ': ' if where else ''}{message}") from None

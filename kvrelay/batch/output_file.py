"""The output of a batch in OpenAI's format: one result per line, in the order in which the requests end.

A line is written whole and at once, and reaches the disk at most `_SYNC_S` later. So after `kill -9` only the last line can
be incomplete, and after a power failure the results of the last second can be missing; both are asked for again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from common.base.errors import KvRelayError
from common.base.files import try_lock
from common.base.sentences import one_line
from kvrelay.api_client import ApiAnswer
from kvrelay.batch.input_file import BadBatch

_SYNC_S = 1.0
_ID_PREFIX = "batch_req_"
_START = b'{"id":"%s' % _ID_PREFIX.encode()
"""Beginning of every line."""


class BatchFailed(KvRelayError):
    """The batch could not go on, or some of its requests failed."""

    exit_code = 1


class OutputFile:
    """The results of this run and of those before it. A context manager; locked against a second writer."""

    def __init__(self, path: Path) -> None:
        """Open the file, cut off an incomplete last line and read what is finished.

        Raises: BadBatch if it cannot be written, is in use, or holds other lines than results.
        """
        self.path = path
        self.finished: set[str] = set()
        """The custom_ids that have a result."""
        self.failed = 0
        """Number of these without a 2xx response."""
        self._synced_s = time.monotonic()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadBatch(f"cannot write {path}: {error.strerror}") from None
        try:
            # A pipe would be read before it is written, for ever.
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise BadBatch(f"cannot write {path}: it is not a file, in which a stopped batch could go on")
            if not try_lock(self._descriptor):
                raise BadBatch(f"{path} is being written by another batch")
            self._read()
            _sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read(self) -> None:
        end_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                whole = line.endswith(b"\n")
                if not whole and (self.finished or line.startswith(_START[: len(line)])):
                    os.ftruncate(self._descriptor, end_bytes)
                    return
                result = _custom_id_and_success(line) if whole else None
                if result is None:
                    raise BadBatch(f"{self.path}, line {number} is not a result of a batch: choose another output file")
                custom_id, succeeded = result
                self.finished.add(custom_id)
                self.failed += not succeeded
                end_bytes += len(line)

    def add(self, custom_id: str, outcome: ApiAnswer | KvRelayError) -> None:
        """Append one result. Raises: BatchFailed if it cannot be written."""
        response: dict[str, Any] | None = None
        error: dict[str, str] | None = None
        if isinstance(outcome, KvRelayError):
            error = {"code": outcome.code, "message": outcome.message}
        else:
            response = outcome._asdict()
        self.finished.add(custom_id)
        self.failed += response is None or not _is_success(response)
        line = {
            "id": f"{_ID_PREFIX}{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        encoded = one_line(to_json(line)) + b"\n"
        rest = memoryview(encoded)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if time.monotonic() > self._synced_s + _SYNC_S:
                os.fsync(self._descriptor)
                self._synced_s = time.monotonic()
        except OSError as failure:
            if rest:
                self._cut_off(len(encoded) - len(rest))
            raise BatchFailed(f"cannot write {self.path}: {failure.strerror}") from None

    def _cut_off(self, size_bytes: int) -> None:
        """Remove the part of a line that was written: a request that ends now could add its result to the same line."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - size_bytes)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(OSError):  # `add` has said what is wrong, or the system's cache holds it
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def _custom_id_and_success(line: bytes) -> tuple[str, bool] | None:
    try:
        result: Any = from_json(line)
        custom_id, response = result["custom_id"], result["response"]
        return (custom_id, response is not None and _is_success(response)) if isinstance(custom_id, str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_success(response: dict[str, Any]) -> bool:
    return 200 <= response["status_code"] < 300


def _sync_folder(folder: Path) -> None:
    """Write the name of a new file to the disk, where that is possible."""
    with contextlib.suppress(OSError):  # a folder that cannot be read, or a file system that does not do this
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

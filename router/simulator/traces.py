"""Reads traces of requests: Mooncake's and Azure's formats.

Mooncake's has JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block of the
prompt. Two blocks have equal ids exactly if their whole prefixes are equal. No two prompts of Azure's share a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from router.simulator.azure_trace import azure_requests, is_azure

_MOST_TOKENS = 10_000_000
"""Maximum tokens of a prompt or an answer, so that a damaged number does not fill memory."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request as a trace has it."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]


def read_trace(path: Path, block_tokens: int) -> list[TraceLine]:
    """All requests of a file, by arrival. Raises: ConfigError naming the invalid line."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    read = _azure if is_azure(text.partition("\n")[0]) else _mooncake
    lines = sorted(read(text.splitlines(), path, block_tokens), key=lambda line: line.arrival_s)
    if not lines:
        raise ConfigError(f"the trace {path} has no requests")
    return lines


def _azure(lines: Sequence[str], path: Path, block_tokens: int) -> Iterator[TraceLine]:
    ids = count()
    for arrival_s, tokens, output in azure_requests(lines, str(path), _MOST_TOKENS):
        yield TraceLine(arrival_s, tokens, max(1, output), list(islice(ids, -(-tokens // block_tokens))))


def _mooncake(lines: Sequence[str], path: Path, block_tokens: int) -> Iterator[TraceLine]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _trace_line(json.loads(line), block_tokens)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def _trace_line(data: dict[str, Any], block_tokens: int) -> TraceLine:
    arrival_s, tokens, output = float(data["timestamp"]) / 1000, int(data["input_length"]), int(data["output_length"])
    if not 1 <= tokens <= _MOST_TOKENS or not 0 <= output <= _MOST_TOKENS:
        raise ValueError(f"input_length must be at least 1, output_length at least 0, and both at most {_MOST_TOKENS}")
    if not 0 <= arrival_s < math.inf:
        raise ValueError("timestamp must be at least 0")
    line = TraceLine(arrival_s, tokens, max(1, output), [int(hash_id) for hash_id in data["hash_ids"]])
    if len(line.hash_ids) != -(-line.input_tokens // block_tokens):
        raise ValueError(
            f"{len(line.hash_ids)} blocks of {block_tokens} tokens cannot hold {line.input_tokens} exactly"
        )
    return line

"""Reads traces of requests: Mooncake's and Azure's formats.

Mooncake's has JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one per block of the
prompt. Two blocks have equal ids exactly if their whole prefixes are equal. Azure's is a CSV file with the columns `TIMESTAMP`,
`ContextTokens` and `GeneratedTokens`; no two of its prompts share a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError

_MOST_TOKENS = 10_000_000
"""Of a prompt or an answer; a damaged number must not fill memory."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request as a trace has it."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]


def read_trace(path: Path, block_tokens: int) -> list[TraceLine]:
    """All requests of a file, by arrival. Raises: ConfigError naming the invalid line."""
    lines: list[TraceLine] = []
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    of_azure = text.startswith("TIMESTAMP,")
    names = text.partition("\n")[0].strip().split(",")
    ids = count()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not (of_azure and number == 1):
            try:
                if of_azure:
                    row = dict(zip(names, line.split(","), strict=True))
                    lines.append(_azure_line(row, block_tokens, ids))
                else:
                    lines.append(_trace_line(json.loads(line), block_tokens))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if not lines:
        raise ConfigError(f"the trace {path} has no requests")
    return sorted(lines, key=lambda line: line.arrival_s)


def _trace_line(data: dict[str, Any], block_tokens: int) -> TraceLine:
    arrival_s, tokens, output = float(data["timestamp"]) / 1000, int(data["input_length"]), int(data["output_length"])
    _check_tokens("input_length", tokens, "output_length", output)
    if not 0 <= arrival_s < math.inf:
        raise ValueError("timestamp must be at least 0")
    line = TraceLine(arrival_s, tokens, max(1, output), [int(hash_id) for hash_id in data["hash_ids"]])
    if len(line.hash_ids) != -(-line.input_tokens // block_tokens):
        raise ValueError(
            f"{len(line.hash_ids)} blocks of {block_tokens} tokens cannot hold {line.input_tokens} exactly"
        )
    return line


def _azure_line(row: dict[str, str], block_tokens: int, ids: Iterator[int]) -> TraceLine:
    tokens, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    _check_tokens("ContextTokens", tokens, "GeneratedTokens", output)
    arrived = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
    return TraceLine(arrived.timestamp(), tokens, max(1, output), list(islice(ids, -(-tokens // block_tokens))))


def _check_tokens(prompt: str, tokens: int, answer: str, output: int) -> None:
    if not 1 <= tokens <= _MOST_TOKENS or not 0 <= output <= _MOST_TOKENS:
        raise ValueError(f"{prompt} must be at least 1, {answer} at least 0, and both at most {_MOST_TOKENS}")

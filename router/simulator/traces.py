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
    line = TraceLine(
        arrival_s=float(data["timestamp"]) / 1000,
        input_tokens=int(data["input_length"]),
        output_tokens=max(1, int(data["output_length"])),
        hash_ids=[int(hash_id) for hash_id in data["hash_ids"]],
    )
    if line.input_tokens < 1 or int(data["output_length"]) < 0 or not 0 <= line.arrival_s < math.inf:
        raise ValueError("input_length must be at least 1, output_length and timestamp at least 0")
    if len(line.hash_ids) != -(-line.input_tokens // block_tokens):
        raise ValueError(
            f"{len(line.hash_ids)} blocks of {block_tokens} tokens cannot hold {line.input_tokens} exactly"
        )
    return line


def _azure_line(row: dict[str, str], block_tokens: int, ids: Iterator[int]) -> TraceLine:
    tokens, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    if tokens < 1 or output < 0:
        raise ValueError("ContextTokens must be at least 1, GeneratedTokens at least 0")
    arrived = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
    return TraceLine(arrived.timestamp(), tokens, max(1, output), list(islice(ids, -(-tokens // block_tokens))))

"""Traces of real services: Mooncake's JSON lines and Azure's CSV files, read and scaled down."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import ConfigError
from kvrelay.load.jobs import LoadJob, fresh_ids, shared_ids
from kvrelay.load.plan import TRACE_BLOCK, LoadPlan
from router.simulator.azure_trace import azure_requests, is_azure

_MAX_TOKENS = 2**31


@dataclass(frozen=True)
class TraceEntry:
    """One line of a trace, not yet scaled."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """Blocks of 512 tokens; empty: the trace does not say which prompts share a prefix."""


def read_trace(path: str) -> list[TraceEntry]:
    """Read a trace, by time. A file whose first line is Azure's header is Azure's, any other Mooncake's.

    Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids` of 512-token blocks.
    Azure: CSV with TIMESTAMP (ISO 8601), ContextTokens and GeneratedTokens; lines without output are left out.

    Raises: ConfigError that names the faulty line.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            read = _azure if is_azure(first) else _mooncake
            entries = list(read(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    if not entries:
        raise ConfigError(f"the trace {path} is empty")
    entries.sort(key=lambda entry: entry.at_s)
    return entries


def _mooncake(lines: Iterator[str], path: str) -> Iterator[TraceEntry]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _mooncake_entry(line, f"{path}, line {number}")


def _mooncake_entry(line: str, place: str) -> TraceEntry:
    try:
        raw = json.loads(line)
        entry = TraceEntry(
            raw["timestamp"] / 1000, int(raw["input_length"]), int(raw["output_length"]), tuple(raw["hash_ids"])
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{place}: {type(error).__name__}: {error}") from error
    if not math.isfinite(entry.at_s):
        raise ConfigError(f"{place}: the timestamp {entry.at_s} is not a time")
    if entry.output_tokens < 0:
        raise ConfigError(f"{place}: the output_length {entry.output_tokens} is negative")
    if len(entry.hash_ids) * TRACE_BLOCK < entry.input_tokens or entry.input_tokens < 1:
        raise ConfigError(f"{place}: {len(entry.hash_ids)} blocks do not hold {entry.input_tokens} tokens")
    return entry


def _azure(lines: Iterator[str], path: str) -> Iterator[TraceEntry]:
    for at_s, prompt, output in azure_requests(lines, path, _MAX_TOKENS - 1):
        if output:
            yield TraceEntry(at_s, prompt, output, ())


def replayed_job(plan: LoadPlan, entries: Sequence[TraceEntry], number: int) -> LoadJob:
    """The entry of this number, scaled down: a 512-token block becomes 512 / `scale` token ids, which depend only on its hash id.
    A prompt without hash ids is unlike any other. In a closed loop the trace's times do not count.
    """
    entry = entries[number]
    block, length = TRACE_BLOCK // plan.scale, max(1, entry.input_tokens // plan.scale)
    if entry.hash_ids:
        blocks = (shared_ids(f"{plan.seed} block {hash_id}", block, plan.vocab_size) for hash_id in entry.hash_ids)
        prompt = list(itertools.islice(itertools.chain.from_iterable(blocks), length))
    else:
        prompt = list(fresh_ids(f"{plan.seed} entry {number}", length, plan.vocab_size))
    at_s = None if plan.concurrency else (entry.at_s - entries[0].at_s) / plan.rate_scale
    return LoadJob(number, prompt, max(1, entry.output_tokens // plan.scale), at_s=at_s)

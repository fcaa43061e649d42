"""Reads Azure's traces of LLM services: CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens. Pure."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterable, Iterator

from common.base.errors import ConfigError

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_azure(first_line: str) -> bool:
    """Whether a file with this first line is such a trace."""
    return first_line.strip().split(",")[0] == _COLUMNS[0]


def azure_requests(lines: Iterable[str], path: str, most_tokens: int) -> Iterator[tuple[float, int, int]]:
    """(arrival in Unix seconds, prompt tokens, generated tokens, which may be 0) of each line.

    Raises: ConfigError that names the faulty line, also for more than `most_tokens`.
    """
    rows = csv.DictReader(lines)
    for row in rows:
        place = f"{path}, line {rows.line_num}"
        if any(name not in row for name in _COLUMNS):
            raise ConfigError(f"{place}: an Azure trace has the columns {', '.join(_COLUMNS)}")
        try:
            stamp, prompt, output = (row[name] for name in _COLUMNS)
            at = datetime.datetime.fromisoformat(stamp)
            lengths = int(prompt), int(output)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{place}: {error}") from error
        if not 1 <= lengths[0] <= most_tokens or not 0 <= lengths[1] <= most_tokens:
            raise ConfigError(f"{place}: {lengths[0]} prompt tokens and {lengths[1]} generated tokens are no request")
        # The published files have no time zone, or that of UTC.
        yield at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp(), *lengths

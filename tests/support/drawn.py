"""The order in which `--draw TEXT` runs tests: of a run that has no time for all, each commit runs others."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

_TOGETHER = 6
"""Tests of one file that run in a row, because they may share a cluster."""


class _Test(Protocol):
    @property
    def nodeid(self) -> str: ...


T = TypeVar("T", bound=_Test)


def drawn(tests: Iterable[T], text: str) -> list[T]:
    """Some tests of each file, files and tests in an order given by `text`; then some more of each file, and so on."""

    def draw(name: str) -> bytes:
        return hashlib.sha256(f"{text} {name}".encode()).digest()

    files: dict[str, list[T]] = collections.defaultdict(list)
    for test in tests:
        files[test.nodeid.partition("::")[0]].append(test)
    rows: list[tuple[int, bytes, Sequence[T]]] = []
    for path, own in files.items():
        own.sort(key=lambda test: draw(test.nodeid))
        rows += [(first, draw(path), own[first : first + _TOGETHER]) for first in range(0, len(own), _TOGETHER)]
    return [test for _, _, row in sorted(rows, key=lambda row: row[:2]) for test in row]

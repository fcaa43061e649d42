"""How much memory a container has."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.base import free_memory


@pytest.mark.parametrize(
    ("version_2", "version_1", "expected"),
    [
        (None, None, 1024 * 4000),
        ("max", None, 1024 * 4000),
        ("1000000", None, 1e6),
        (None, "2000000", 2e6),
        (None, "9223372036854771712", 1024 * 4000),
        (None, "8000000", 1024 * 4000),
    ],
)
def test_free_memory_is_at_most_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_2: str | None, version_1: str | None, expected: float
) -> None:
    """The limit of version 1 of control groups, which Docker has on older hosts, did not count."""
    files = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    for file, content in zip(files, (version_2, version_1), strict=True):
        if content is not None:
            file.write_text(content + "\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    monkeypatch.setattr(free_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(free_memory, "_CGROUP_LIMITS", files)
    assert free_memory.free_memory_bytes() == expected

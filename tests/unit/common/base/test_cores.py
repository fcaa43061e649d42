"""Cores: those that the process may run on, and what the quotas of its control groups are worth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.base import cores
from common.base.cores import usable_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def written(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("200000 100000", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("9900000 100000", 8),
        ("odd", 8),
    ],
)
def test_a_quota_of_version_2_counts_in_whole_cores(tmp_path: Path, quota: str, expected: int) -> None:
    written(tmp_path / "cpu.max", quota + "\n")
    assert usable_cores(tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 8)])
def test_a_quota_of_version_1_counts_too(tmp_path: Path, quota: str, expected: int) -> None:
    written(tmp_path / "cpu/cpu.cfs_quota_us", quota)
    written(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    assert usable_cores(tmp_path, tmp_path / "none") == expected


def test_the_least_quota_on_the_way_to_the_own_group_holds(tmp_path: Path) -> None:
    """As of a service of systemd in a slice with a quota."""
    own = tmp_path / "own"
    own.write_text("0::/machine.slice/kvrelay.service\n")
    root = tmp_path / "cgroup"
    written(root / "machine.slice/cpu.max", "300000 100000")
    written(root / "machine.slice/kvrelay.service/cpu.max", "max 100000")
    written(root / "other.slice/cpu.max", "100000 100000")
    assert usable_cores(root, own) == 3
    own.write_text("5:cpu,cpuacct:/a/b\n4:memory:/c\n")
    written(root / "cpu/a/cpu.cfs_quota_us", "200000")
    written(root / "cpu/a/cpu.cfs_period_us", "100000")
    assert usable_cores(root, own) == 2


def test_without_quotas_the_cores_of_the_affinity_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 8
    assert cores.usable_cores() <= 8

"""KV memory on a CPU is zeroed, and used only as it is written."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import psutil
import pytest
from support.kv_words import kv_words

from common.base.errors import ConfigError
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

LAYOUT = KVLayout("f", KVSpec.uniform(2, 2, 64, "float32"))


def test_memory_is_zero_and_used_only_as_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    storage = KVStorage(LAYOUT, LAYOUT.shard(0, 0), 2**30 // LAYOUT.spec.bytes_per_block)
    assert storage.data.nbytes == 2**30
    assert psutil.Process().memory_info().rss - before < 2**27
    block = kv_words(storage)[1, 1, -1]
    assert not block.any()
    storage.groups[0].planes["v"][1, -1] = 1.0
    assert block.all(), "both are views of the same memory"


def test_more_memory_than_is_free_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no memory for [0-9.]+ GB of KV: [0-9.]+ GB are free"):
        KVStorage(LAYOUT, LAYOUT.shard(0, 0), 2**56 // LAYOUT.spec.bytes_per_block)
    monkeypatch.setattr("common.kv.storage.free_memory_bytes", lambda: math.inf)  # a system that does not tell
    with pytest.raises(ConfigError, match=r"no memory for [0-9.]+ GB of KV"):
        KVStorage(LAYOUT, LAYOUT.shard(0, 0), 2**56 // LAYOUT.spec.bytes_per_block)


@pytest.mark.parametrize(("limit", "fits"), [("max", True), (str(2**30), True), (str(2**20), False), (None, True)])
def test_a_containers_limit_counts(
    limit: str | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_file = tmp_path / "memory.max"
    if limit is not None:
        limit_file.write_text(limit + "\n")
    monkeypatch.setattr("common.base.free_memory._CGROUP_LIMITS", (limit_file,))
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match=r": 0\.00 GB are free"):
        KVStorage(LAYOUT, LAYOUT.shard(0, 0), 2**24 // LAYOUT.spec.bytes_per_block)

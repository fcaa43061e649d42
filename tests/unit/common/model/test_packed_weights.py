"""Weights are packed once per host, whatever dies, fills up or starts at the same time; and the cache stays bounded."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support import warm_start

from common.model import packed_weights
from common.model.cached_models import cached_models
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights, open_packed_weights

MEGABYTE = 2**20


def ones(megabytes: int = 1) -> PackedTensors:
    return PackedTensors({"weight": torch.ones(megabytes * MEGABYTE // 4)}, {"out": 1})


def never() -> PackedTensors:
    raise AssertionError("packed again")


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[PackedWeights]:
    with closing(PackedWeights(tmp_path, "model", 1.0)) as opened:
        yield opened


def test_what_was_packed_is_found_by_another_process_s_store(weights: PackedWeights, tmp_path: Path) -> None:
    made = weights.get("a", ones)
    with closing(PackedWeights(tmp_path, "model", 1.0)) as other:
        found = other.get("a", never)
    assert found.numbers == made.numbers
    assert torch.equal(found.tensors["weight"], made.tensors["weight"])


def test_what_is_returned_is_mapped_also_to_the_one_who_packed_it(weights: PackedWeights, tmp_path: Path) -> None:
    tensor = weights.get("a", ones).tensors["weight"]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    assert any(lo <= tensor.data_ptr() < hi for lo, hi in spans)
    assert all(" r--s " in line for line in maps)


def test_another_key_model_or_code_is_packed_on_its_own(
    weights: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights.get("a", ones)
    with pytest.raises(AssertionError, match="packed again"):
        weights.get("b", never)
    with closing(PackedWeights(tmp_path, "another", 1.0)) as other, pytest.raises(AssertionError, match="packed again"):
        other.get("a", never)
    monkeypatch.setattr(packed_weights, "_code_digest", lambda: "newer")
    with closing(PackedWeights(tmp_path, "model", 1.0)) as newer, pytest.raises(AssertionError, match="packed again"):
        newer.get("a", never)


def test_the_key_covers_all_code_that_decides_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    common = Path(packed_weights.__file__).parent.parent
    covered = {str(file.relative_to(common)) for file in packed_weights._code_files()}
    families = {"model/generic/checkpoint.py", "model/families/gpt2.py", "model/gguf/weights.py"}
    assert families | {"model/formats/float8.py", "kernels/float8.py", "kernels/native/linear.py"} <= covered
    before = packed_weights._code_digest.__wrapped__()
    monkeypatch.setattr(packed_weights, "version", lambda library: "0.0")
    assert packed_weights._code_digest.__wrapped__() != before


def test_what_other_code_packed_is_removed_unless_it_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("old", "older"):
        monkeypatch.setattr(packed_weights, "_code_digest", lambda code=code: code)
        opened = PackedWeights(tmp_path, "model", 1.0)
        opened.get("a", ones)
        if code == "old":
            opened.close()
    monkeypatch.setattr(packed_weights, "_code_digest", lambda: "new")
    with closing(PackedWeights(tmp_path, "model", 1.0)), closing(opened):
        assert {model.folder.name for model in cached_models(tmp_path)} == {"model-older", "model-new"}


def test_a_damaged_file_is_packed_again(weights: PackedWeights, tmp_path: Path) -> None:
    weights.get("a", ones)
    (file,) = (file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > MEGABYTE)
    file.write_bytes(file.read_bytes()[:-1])
    assert weights.get("a", ones).tensors["weight"].sum() == MEGABYTE // 4
    weights.get("a", never)


PACK = """
import pathlib, sys, time, torch
from common.model.packed_file import PackedTensors
from common.model.packed_weights import PackedWeights
def make():
    print("packing", flush=True)
    time.sleep(float(sys.argv[2]))
    return PackedTensors({"weight": torch.ones(1000)})
found = PackedWeights(pathlib.Path(sys.argv[1]), "model", 1.0).get("a", make)
print("sum", int(found.tensors["weight"].sum()), flush=True)
"""


def packer(folder: Path, seconds: float) -> warm_start.WarmScript:
    return warm_start.script(PACK, str(folder), str(seconds))


def test_of_several_processes_that_start_at_once_one_packs(tmp_path: Path) -> None:
    processes = [packer(tmp_path, 0.5) for _ in range(3)]
    outputs = [process.stdout.read() for process in processes]
    assert sorted(outputs) == ["packing\nsum 1000\n", "sum 1000\n", "sum 1000\n"]
    for process in processes:
        process.end()


def test_a_packer_that_is_killed_blocks_nobody(weights: PackedWeights, tmp_path: Path) -> None:
    killed = packer(tmp_path, 600.0)
    assert killed.stdout.readline() == "packing\n"
    killed.end()
    assert weights.get("a", ones).tensors["weight"].numel() == MEGABYTE // 4
    weights.get("a", never)


PACK_IN_PART = PACK.replace(
    "def make",
    """
import common.model.packed_weights as packed_weights
def written_in_part(file, key, packed):
    file.write_bytes(b"part")
    print("writing", flush=True)
    time.sleep(600)
packed_weights.write_packed = written_in_part
def make""",
)


def test_what_a_killed_packer_had_written_is_removed_at_the_next_start_and_not_before(tmp_path: Path) -> None:
    killed = warm_start.script(PACK_IN_PART, str(tmp_path), "0")
    assert [killed.stdout.readline() for _ in range(2)] == ["packing\n", "writing\n"]
    with closing(PackedWeights(tmp_path, "model", 1.0)):
        assert len(list(tmp_path.rglob("*.part"))) == 1
    killed.end()
    with closing(PackedWeights(tmp_path, "model", 1.0)):
        assert not list(tmp_path.rglob("*.part"))


def test_a_slow_packer_is_waited_for_until_a_deadline_then_weights_are_private(
    weights: PackedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_weights, "_WAIT_S", 0.05)
    slow = packer(tmp_path, 600.0)
    assert slow.stdout.readline() == "packing\n"
    assert weights.get("a", ones).numbers == {"out": 1}
    assert "another process took over" in caplog.text
    slow.end()


@pytest.mark.parametrize("fails", ["posix_fallocate", "replace"])
def test_a_full_disk_means_private_memory_and_one_line_in_the_log(
    weights: PackedWeights,
    tmp_path: Path,
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, fails) if fails == "posix_fallocate" else (Path, fails)), full)
    with caplog.at_level(logging.WARNING):
        assert [weights.get(key, ones).numbers for key in "abc"] == [{"out": 1}] * 3
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.messages[0]
    assert not list(tmp_path.rglob("*.part"))


def test_least_recently_used_models_make_room_but_none_that_is_in_use(tmp_path: Path) -> None:
    limit_gb = 3.5 / 1024
    names = ("first", "second", "third")
    opened = {name: PackedWeights(tmp_path, name, limit_gb) for name in names}
    for at, name in enumerate(names):
        opened[name].get("a", ones)
        os.utime(next(tmp_path.glob(f"{name}-*")) / "in-use", (at, at))
    opened["second"].close()
    opened["third"].close()
    with closing(PackedWeights(tmp_path, "fourth", limit_gb)) as fourth, closing(opened["first"]):
        fourth.get("a", ones)
        left = {model.folder.name.partition("-")[0] for model in cached_models(tmp_path)}
    assert left == {"first", "third", "fourth"}


def test_a_model_that_is_opened_and_removed_again_during_its_removal_is_whole_and_disturbs_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(PackedWeights(tmp_path, "model", 1.0)) as before:
        before.get("a", ones)
    (model,) = cached_models(tmp_path)
    rmtree, opened = shutil.rmtree, list[PackedWeights]()

    def remove_file_by_file(folder: Path, ignore_errors: bool = False) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        for file in folder.iterdir():
            file.unlink()
        assert [each.remove() for each in cached_models(tmp_path)] == [True]
        opened.append(PackedWeights(tmp_path, "model", 1.0))
        opened[0].get("b", ones)
        rmtree(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove_file_by_file)
    assert model.remove()
    with closing(opened[0]):
        opened[0].get("b", never)
        assert not model.remove()
        assert [each.folder for each in cached_models(tmp_path)] == [model.folder]


def test_where_all_is_in_use_and_the_limit_reached_weights_are_private(
    weights: PackedWeights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights.get("a", ones)
    with closing(PackedWeights(tmp_path, "another", 1.5 / 1024)) as other:
        assert other.get("a", ones).numbers == {"out": 1}
    assert "--packed-cache-gb" in caplog.text
    weights.get("a", never)


def test_the_default_limit_is_a_part_of_the_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights.shutil, "disk_usage", lambda path: _Usage())
    with closing(PackedWeights(tmp_path, "model", None)) as opened:
        opened.get("a", lambda: ones(1))
        opened.get("b", lambda: ones(2))
        opened.get("a", never)
        with pytest.raises(AssertionError, match="packed again"):
            opened.get("b", never)


class _Usage:
    free = 8 * MEGABYTE


def test_a_cache_that_cannot_be_opened_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file"))
    assert open_packed_weights("fingerprint", "state", None, lambda: True) is None
    assert len(caplog.messages) == 1
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    assert open_packed_weights("fingerprint", "state", 0, lambda: True) is None
    opened = open_packed_weights("fingerprint", "state", None, lambda: True)
    assert opened is not None
    opened.close()


def test_what_was_read_of_files_that_changed_meanwhile_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(PackedWeights(tmp_path, "model", 1.0, lambda: False)) as opened:
        assert opened.get("a", ones).numbers == {"out": 1}
    assert "changed while they were read" in caplog.text
    assert not list(tmp_path.rglob("*.part"))
    with closing(PackedWeights(tmp_path, "model", 1.0)) as after, pytest.raises(AssertionError, match="packed again"):
        after.get("a", never)

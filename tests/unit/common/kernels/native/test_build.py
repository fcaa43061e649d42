"""The native library is found or compiled once, never used when damaged, and no dead or slow compiler blocks anybody."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fake_compiler import FAILS, HANGS, install_compiler
from support.paths import ROOT

from common.kernels.native import build, compiler
from common.kernels.native.build import Missing, build_for_wheel, build_library, find_library, main
from common.kernels.native.compiler import CompileFailed
from common.kernels.native.recipe import variants


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the PATH, still empty; the cache is empty too, and there is no ziglang."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_find_zig", lambda: None)
    return folder


def built(timeout_s: float = 60.0) -> Path:
    library = build_library(timeout_s)
    assert isinstance(library, Path), library
    return library


def test_without_a_compiler_there_is_one_reason_and_no_library(bin_folder: Path) -> None:
    assert find_library() == Missing("no C++ compiler found")
    assert build_library(60.0) == Missing("no C++ compiler found")


def test_find_library_never_compiles(bin_folder: Path) -> None:
    calls = install_compiler(bin_folder)
    assert find_library() == Missing("not compiled")
    assert calls.read_text() == ""


def test_a_library_is_compiled_once_and_then_found(bin_folder: Path) -> None:
    calls = install_compiler(bin_folder)
    library = built()
    after_first = calls.read_text()
    assert find_library() == library == built()
    assert calls.read_text() == after_first


def test_each_variant_of_this_machine_is_compiled_with_its_own_flags(bin_folder: Path) -> None:
    calls = install_compiler(bin_folder)
    built()
    lines = calls.read_text().splitlines()
    for variant in variants(build.this_machine()):
        (line,) = [line for line in lines if f"-DKV_VARIANT={variant.name} " in line]
        assert all(flag in line.split() for flag in variant.flags)
        assert "-march=native" not in line


def test_a_truncated_library_is_compiled_again(bin_folder: Path) -> None:
    install_compiler(bin_folder)
    library = built()
    whole = library.read_bytes()
    library.write_bytes(whole[:-1])
    assert find_library() == Missing("not compiled")
    assert built().read_bytes() == whole


def test_a_changed_compiler_compiles_again(bin_folder: Path) -> None:
    calls = install_compiler(bin_folder)
    built()
    with (bin_folder / "c++").open("a") as program:
        program.write("# a newer version\n")
    assert find_library() == Missing("not compiled")
    before = len(calls.read_text().splitlines())
    built()
    assert len(calls.read_text().splitlines()) == 2 * before


def test_a_library_in_the_cache_is_found_where_the_path_has_no_compiler(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_compiler(bin_folder)
    library = built()
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_library() == library


def test_threads_and_processes_that_start_at_once_compile_once(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install_compiler(bin_folder, "time.sleep(0.1)")
    monkeypatch.setenv("CXX", "c++")  # the processes may find ziglang
    command = [sys.executable, "-m", "common.kernels.native.build"]
    with ThreadPoolExecutor() as pool:
        processes = [subprocess.Popen(command, cwd=ROOT, env=dict(os.environ)) for _ in range(2)]
        libraries = [pool.submit(built) for _ in range(2)]
        assert len({each.result() for each in libraries}) == 1
        assert [process.wait(60) for process in processes] == [0, 0]
    links = [line for line in calls.read_text().splitlines() if " -shared " in f" {line} "]
    assert len(links) == 1


def test_a_builder_that_is_killed_blocks_nobody_and_leaves_nothing(
    bin_folder: Path, tmp_path: Path, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    calls = install_compiler(bin_folder, HANGS)
    command = [sys.executable, "-m", "common.kernels.native.build"]
    builder = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))
    eventually(lambda: calls.read_text(), 60.0)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    install_compiler(bin_folder)
    built()
    assert not list((tmp_path / "cache" / "native").glob("compiling-*"))


def test_a_compiler_that_takes_too_long_is_ended(bin_folder: Path, tmp_path: Path) -> None:
    install_compiler(bin_folder, HANGS)
    found = build_library(0.3)
    assert isinstance(found, Missing)
    assert "not done in time; `" in found.reason
    assert "-m common.kernels.native.build` gives it ten minutes" in found.reason
    assert not list((tmp_path / "cache" / "native").glob("compiling-*"))


def test_no_other_compiler_is_started_when_there_is_no_time_left(
    bin_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_compiler(bin_folder, HANGS)
    shutil.copy(bin_folder / "c++", bin_folder / "g++")
    with caplog.at_level("INFO"):
        assert isinstance(build_library(0.3), Missing)
    assert "with g++" not in caplog.text


def test_a_process_that_waits_for_another_s_compiler_has_a_deadline(
    bin_folder: Path, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    calls = install_compiler(bin_folder, HANGS)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(build_library, 2.0)
        eventually(lambda: calls.read_text(), 60.0)
        assert "another process" in str(build_library(0.1))
        assert isinstance(first.result(), Missing)


def test_the_next_compiler_is_tried_where_one_fails(bin_folder: Path) -> None:
    install_compiler(bin_folder)
    (bin_folder / "c++").rename(bin_folder / "clang++")
    install_compiler(bin_folder, FAILS)
    built()


def test_the_first_compiler_s_error_is_the_reason_where_all_fail(bin_folder: Path) -> None:
    install_compiler(bin_folder, FAILS)
    found = build_library(60.0)
    assert isinstance(found, Missing)
    assert found.reason == "c++ cannot compile them: kernels.cpp:1: fatal error: it is too old"


def test_the_compiler_that_cxx_names_is_the_only_one_used(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install_compiler(bin_folder)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert build_library(60.0) == Missing("no C++ compiler found: CXX names no-such-compiler -O1")
    (bin_folder / "c++").rename(bin_folder / "mine")
    monkeypatch.setenv("CXX", "mine -g")
    built()
    assert all(line.startswith("-g ") for line in calls.read_text().splitlines())


def test_a_cache_that_cannot_be_written_is_a_reason_not_an_error(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_compiler(bin_folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file" / "cache"))
    found = build_library(60.0)
    assert isinstance(found, Missing)
    assert caplog.messages == [f"the native kernels cannot be compiled: {found.reason}"]
    monkeypatch.setenv("KVRELAY_CACHE", "relative")
    assert build_library(60.0) == Missing("KVRELAY_CACHE=relative is not an absolute path")


def test_only_the_newest_libraries_are_kept(bin_folder: Path, tmp_path: Path) -> None:
    install_compiler(bin_folder)
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    for age in range(20):
        old = folder / f"kvrelay-{age}-0-0.so"
        old.touch()
        os.utime(old, (time.time() - 60 * (age + 1),) * 2)
    library = built()
    kept = sorted(file.name for file in folder.glob("*.so"))
    assert kept == sorted([library.name, *(f"kvrelay-{age}-0-0.so" for age in range(7))])


def test_the_command_says_whether_there_is_a_library_and_why_not(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "configure", lambda level: None)
    with caplog.at_level(logging.WARNING):
        assert main() == 1
    assert caplog.messages == ["no native kernels: no C++ compiler found"]
    install_compiler(bin_folder)
    assert main() == 0


def test_the_library_of_a_wheel_is_found_without_a_cache_or_a_compiler(
    bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    with pytest.raises(CompileFailed, match="no C\\+\\+ compiler found"):
        build_for_wheel(prebuilt, "linux_x86_64")
    install_compiler(bin_folder)
    library, tag = build_for_wheel(prebuilt, "linux_x86_64")
    assert tag == "linux_x86_64"
    monkeypatch.setattr(build, "_PREBUILT", prebuilt)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_library() == library

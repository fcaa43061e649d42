"""The native kernels under address and undefined-behaviour sanitizers: attention in a program of its own, in memory of
exactly the right sizes, and all kernels by their conformance tests."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.native_variants import VARIANTS
from support.paths import ROOT, TESTS

from common.kernels.native.compiler import Compiler, find_compilers, run_all
from common.kernels.native.recipe import SOURCES, make_recipe, this_machine

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

DRIVER = TESTS / "support" / "data" / "attention_driver.cpp"
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILE_S, RUN_S = 800.0, 120.0
CONFORMANCE_S = 800.0
BATCHES = 60
NOT_SUPPORTED = 77


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    found = next((found for found in find_compilers(os.environ) if not found.is_zig), None)
    if found is None:
        pytest.skip("no C++ compiler with sanitizers: ziglang has none")
    return found


@pytest.fixture(scope="module")
def driver(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    recipe = make_recipe(compiler, SOURCES, this_machine())
    compiled = [(*command, *FLAGS) for command in recipe.compile]
    run_all(compiled, folder, os.environ, time.monotonic() + COMPILE_S)
    objects = [command[-1] for command in recipe.compile]
    command = (
        *compiler.command,
        "-std=c++20",
        "-pthread",
        *FLAGS,
        f"-I{SOURCES}",
        str(DRIVER),
        *objects,
        "-o",
        "driver",
    )
    run_all([command], folder, os.environ, time.monotonic() + COMPILE_S)
    return folder / "driver"


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_stays_inside_its_memory(driver: Path, variant: str) -> None:
    done = subprocess.run([driver, variant, str(BATCHES)], capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode == NOT_SUPPORTED:
        pytest.skip(f"the processor does not run the native kernels for {variant}")
    assert done.stdout == "done\n", done.stderr[-3000:]


@pytest.mark.parametrize("name", ["test_linear.py", "test_kernels.py", "test_attention.py"])
def test_the_conformance_tests_pass_under_sanitizers(
    compiler: Compiler, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "sanitized-library"
    folder.mkdir(exist_ok=True)
    sanitizing = folder / "c++"  # a program, because CXX's own arguments come before those of the recipe
    sanitizing.write_text(f'#!/bin/sh\nexec {shlex.join(compiler.command)} "$@" {shlex.join(FLAGS)}\n', "utf-8")
    sanitizing.chmod(0o755)
    runtime = [*compiler.command, "-print-file-name=libasan.so"]
    environ = {
        **os.environ,
        "CXX": str(sanitizing),
        "KVRELAY_CACHE": str(folder),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    build = [sys.executable, "-m", "common.kernels.native.build"]
    subprocess.run(build, env=environ, cwd=ROOT, check=True, timeout=COMPILE_S)
    environ["LD_PRELOAD"] = subprocess.run(runtime, capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(Path(__file__).with_name(name))]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=CONFORMANCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "no native kernels" not in done.stdout, done.stdout[-3000:]

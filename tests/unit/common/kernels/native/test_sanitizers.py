"""Native attention, linear layers and experts under address and undefined-behaviour sanitizers, in memory of exactly the right sizes."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from support.native_variants import VARIANTS
from support.paths import TESTS

from common.kernels.native.compiler import Compiler, find_compilers, run_all
from common.kernels.native.recipe import SOURCES, make_recipe, this_machine

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

DRIVER = TESTS / "support" / "data" / "kernels_driver.cpp"
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILE_S, RUN_S = 800.0, 120.0
ROUNDS = 60
NOT_SUPPORTED = 77


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    found = next((found for found in find_compilers(os.environ) if not found.is_zig), None)
    if found is None:
        pytest.skip("no C++ compiler with sanitizers: ziglang has none")
    return found


@pytest.fixture(scope="module")
def objects(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The compiled sources."""
    folder = tmp_path_factory.mktemp("sanitized")
    recipe = make_recipe(compiler, SOURCES, this_machine())
    run_all([(*command, *FLAGS) for command in recipe.compile], folder, os.environ, time.monotonic() + COMPILE_S)
    return [folder / command[-1] for command in recipe.compile]


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_stay_inside_their_memory(
    compiler: Compiler, objects: list[Path], variant: str, tmp_path: Path
) -> None:
    flags = ("-std=c++20", "-pthread", *FLAGS, f"-I{SOURCES}", f"-DKV_VARIANT={variant}")
    command = (*compiler.command, *flags, str(DRIVER), *map(str, objects), "-o", "driver")
    run_all([command], tmp_path, os.environ, time.monotonic() + COMPILE_S)
    driver = tmp_path / "driver"
    done = subprocess.run([driver, variant, str(ROUNDS)], capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode == NOT_SUPPORTED:
        pytest.skip(f"the processor does not run the native kernels for {variant}")
    assert done.stdout == "done\n", done.stderr[-3000:]

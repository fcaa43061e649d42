"""The commands that compile the library, and a real compilation by a compiler of this machine."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from common.kernels.native.compiler import CompileFailed, Compiler, find_compilers, run_all
from common.kernels.native.recipe import Variant, make_recipe, platform_tag, source_digest, variants

ZIG = Compiler("zig", ("zig", "c++"), "ziglang 1", is_zig=True)
GNU = Compiler("g++", ("g++",), "g++ 12")
KERNELS = """
#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
extern "C" __attribute__((visibility("default"))) int NAME(answer_, KV_VARIANT)() {
#if defined(__AVX2__) || defined(__ARM_FEATURE_BF16)
    return 2;
#else
    return 1;
#endif
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "kernels.cpp").write_text(KERNELS)
    (folder / "api.cpp").write_text("// nothing\n")
    (folder / "api.h").write_text("// nothing\n")
    return folder


def test_the_digest_changes_with_any_source_and_with_the_processor(sources: Path) -> None:
    digests = {source_digest(sources, "x86_64"), source_digest(sources, "aarch64")}
    (sources / "api.h").write_text("// something\n")
    digests.add(source_digest(sources, "x86_64"))
    assert len(digests) == 3


def test_objects_of_the_least_capable_variant_are_linked_first(sources: Path) -> None:
    link = make_recipe(GNU, sources, "x86_64").link
    objects = [argument for argument in link if argument.endswith(".o")]
    assert objects == ["api.o", "portable.o", "amx_emulated.o", "avx2.o", "avx512.o", "avx512bf16.o", "amx.o"]


@pytest.mark.parametrize("variant", [*variants("x86_64"), *variants("aarch64")], ids=lambda variant: variant.name)
def test_zig_compiles_each_variant_for_the_same_instructions_as_other_compilers(variant: Variant) -> None:
    features = {flag.removeprefix("-m").replace("-", "_") for flag in variant.flags if not flag.startswith("-march")}
    features |= {part for flag in variant.flags if flag.startswith("-march") for part in flag.split("+")[1:]}
    assert features <= set(variant.zig_cpu.split("+"))


def test_an_unknown_processor_gets_the_portable_variant() -> None:
    assert [variant.name for variant in variants("riscv64")] == ["portable"]


def test_a_wheel_by_zig_runs_on_older_systems_and_says_so(sources: Path) -> None:
    recipe = make_recipe(ZIG, sources, "x86_64", for_wheel=True)
    for command in (*recipe.compile, recipe.link):
        assert command[command.index("-target") + 1] == "x86_64-linux-gnu.2.28"
    assert platform_tag(ZIG, "x86_64", "linux_x86_64") == "manylinux_2_28_x86_64"
    assert platform_tag(GNU, "x86_64", "linux_x86_64") == "linux_x86_64"


def test_every_compiler_of_this_machine_makes_a_library_that_holds_all_variants(sources: Path, tmp_path: Path) -> None:
    compilers = [each for each in find_compilers(os.environ) if not each.is_zig]
    if not compilers:
        pytest.skip("no C++ compiler on the PATH")
    for compiler in compilers:
        work = tmp_path / f"work-{compiler.name}"
        work.mkdir()
        recipe = make_recipe(compiler, sources, os.uname().machine)
        run_all(recipe.compile, work, os.environ, time.monotonic() + 120)
        run_all([recipe.link], work, os.environ, time.monotonic() + 120)
        library = ctypes.CDLL(str(work / recipe.target))
        own = variants(os.uname().machine)
        plain = ("portable", "amx_emulated")
        assert {each.name: library[f"answer_{each.name}"]() for each in own} == {
            each.name: 1 if each.name in plain else 2 for each in own
        }


def test_an_error_in_a_source_is_one_line_with_its_place(sources: Path, tmp_path: Path) -> None:
    compilers = [each for each in find_compilers(os.environ) if not each.is_zig]
    if not compilers:
        pytest.skip("no C++ compiler on the PATH")
    (sources / "api.cpp").write_text("int wrong() { return missing; }\n")
    recipe = make_recipe(compilers[0], sources, os.uname().machine)
    with pytest.raises(CompileFailed, match=r"api\.cpp:1:.*missing"):
        run_all(recipe.compile, tmp_path, os.environ, time.monotonic() + 120)

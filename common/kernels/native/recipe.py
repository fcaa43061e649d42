"""How the native library is compiled: its sources, its variants and their flags, and the commands. Pure. No torch."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

from common.kernels.native.compiler import Compiler

SOURCES = Path(__file__).parent / "src"
_PER_VARIANT = "kernels.cpp"
"""Compiled once for each variant; every other source once."""
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
)
_GLIBC_OF_WHEELS = "2.28"


@dataclass(frozen=True)
class Variant:
    """The kernels for one instruction set. `zig_cpu` says the same as `flags`, because zig takes no `-m` flags."""

    name: str
    flags: tuple[str, ...]
    zig_cpu: str
    options: tuple[str, ...] = ()
    """More options, the same for all compilers."""


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
_AMX = (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16", "amx-int8")


def _x86(name: str, features: tuple[str, ...], *options: str) -> Variant:
    zig_cpu = "+".join(("baseline", *(feature.replace("-", "_") for feature in features)))
    return Variant(name, tuple(f"-m{feature}" for feature in features), zig_cpu, options)


_VARIANTS = {
    "x86_64": (
        _x86("portable", ()),
        _x86("amx_emulated", (), "-DKV_HAS_TILES", "-DKV_EMULATES_TILES", "-O1"),
        _x86("avx2", _AVX2),
        _x86("avx512", _AVX512),
        _x86("avx512bf16", (*_AVX512, "avx512bf16")),
        _x86("amx", _AMX, "-DKV_HAS_TILES"),
    ),
    "aarch64": (
        Variant("portable", (), "baseline"),
        Variant("neonbf16", ("-march=armv8.2-a+bf16+dotprod",), "baseline+v8_2a+bf16+dotprod"),
    ),
}
"""By processor, least capable first: if objects share an inline function, the linker keeps the first one's."""

_OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def this_machine() -> str:
    """The processor's architecture, as `_VARIANTS` names it."""
    machine = platform.machine().lower()
    return _OTHER_NAMES.get(machine, machine)


def variants(machine: str) -> tuple[Variant, ...]:
    """The variants that a library for `machine` holds."""
    return _VARIANTS.get(machine, (Variant("portable", (), "baseline"),))


def source_digest(sources: Path, machine: str) -> str:
    """Digest of everything that a library is made from, without the compiler. Raises: OSError."""
    digest = hashlib.sha256(repr((machine, platform.system())).encode())
    for file in [Path(__file__), *sorted(sources.iterdir())]:
        digest.update(f"\0{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Recipe:
    """The commands that make a library from `sources`, run in a folder of their own."""

    compile: tuple[tuple[str, ...], ...]
    """In any order, or at the same time."""
    link: tuple[str, ...]
    target: str
    """Name of the library in that folder."""


def make_recipe(compiler: Compiler, sources: Path, machine: str, *, for_wheel: bool = False) -> Recipe:
    """The commands for `machine`, which only zig can choose: it compiles for machines other than this one too.

    `for_wheel`: for other Linux systems as well, as far as the compiler can.
    """
    target = _zig_target(machine, for_wheel) if compiler.is_zig else ()
    base = (*compiler.command, *target, *_FLAGS)
    commands: list[tuple[str, ...]] = []
    objects: list[str] = []
    for variant in variants(machine):
        flags = (f"-mcpu={variant.zig_cpu}",) if compiler.is_zig else variant.flags
        objects.append(f"{variant.name}.o")
        named = f"-DKV_VARIANT={variant.name}"
        commands.append((*base, *flags, *variant.options, named, "-c", str(sources / _PER_VARIANT), "-o", objects[-1]))
    baseline = ("-mcpu=baseline",) if compiler.is_zig else ()
    shared = sorted(file for file in sources.glob("*.cpp") if file.name != _PER_VARIANT)
    for file in shared:
        objects.insert(0, f"{file.stem}.o")
        commands.append((*base, *baseline, "-c", str(file), "-o", f"{file.stem}.o"))
    # The C++ runtime is linked in and hidden, because PyTorch brings another one into the process. zig does so by itself.
    is_gnu = platform.system() == "Linux" and not compiler.is_zig
    static = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL") if is_gnu else ()
    library = "library.so"
    link = (*compiler.command, *target, *baseline, "-shared", "-pthread", *static, *objects, "-o", library)
    return Recipe(tuple(commands), link, library)


def _zig_target(machine: str, for_wheel: bool) -> tuple[str, ...]:
    if for_wheel and platform.system() == "Linux":
        return ("-target", f"{machine}-linux-gnu.{_GLIBC_OF_WHEELS}")
    return () if machine == this_machine() else ("-target", f"{machine}-linux-gnu")


def platform_tag(compiler: Compiler, machine: str, own_tag: str) -> str:
    """The platform tag of a wheel with a library of `make_recipe(for_wheel=True)`. `own_tag`: of the building system."""
    if compiler.is_zig and platform.system() == "Linux":
        return f"manylinux_{_GLIBC_OF_WHEELS.replace('.', '_')}_{machine}"
    return own_tag

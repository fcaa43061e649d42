"""The native kernels in every variant that this processor runs."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from common.kernels.native.build import find_library
from common.kernels.native.library import NativeLibrary
from common.kernels.native.recipe import this_machine, variants

VARIANTS = [variant.name for variant in variants(this_machine())]
EMULATED = "amx_emulated"


def _has_matrix_units() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and {"amx_bf16", "amx_int8"} <= set(processor.read_text().split())


TILES = [pytest.param(EMULATED, marks=[pytest.mark.thorough] if _has_matrix_units() else []), "amx"]
"""Matrix units, and their emulation, which is slow: a further case where there are matrix units, because both give the same."""
DISTINCT = [*(name for name in VARIANTS if name not in (EMULATED, "amx")), *(TILES if EMULATED in VARIANTS else [])]
"""All variants, for tests that compute much."""


@functools.cache
def native(variant: str, threads: int = 2) -> NativeLibrary:
    """The library with `variant` chosen. Skips the test, with the reason, where the variant cannot run."""
    found = find_library()
    if not hasattr(found, "exists"):
        pytest.skip(f"no native kernels: {found}")
    library = NativeLibrary(found, variant, threads)  # pyright: ignore[reportArgumentType]
    if library.variant != variant:
        pytest.skip(f"the processor does not run the native kernels for {variant}")
    return library

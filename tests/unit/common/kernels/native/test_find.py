from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.base.errors import ConfigError
from common.base.variables import CPU_KERNELS
from common.kernels.native import calibration, find
from common.kernels.native.build import Missing
from common.kernels.native.find import describe_native, find_native


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    find._load.cache_clear()
    yield
    find._load.cache_clear()


def test_without_a_library_pytorch_computes_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(find, "find_library", lambda: Missing("no C++ compiler found"))
    with caplog.at_level(logging.INFO):
        assert find_native() is None
        assert describe_native() == "PyTorch (native kernels: no C++ compiler found)"
    assert caplog.messages == ["kernels: PyTorch (native kernels: no C++ compiler found)"]


def test_a_library_that_does_not_load_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "broken.so"
    file.write_bytes(b"no library")
    monkeypatch.setattr(find, "find_library", lambda: file)
    assert find_native() is None
    assert "do not load" in describe_native()


def test_the_variable_turns_native_kernels_off_or_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNELS, "torch")
    assert find_native() is None
    assert describe_native() == "PyTorch (KVRELAY_CPU_KERNELS=torch)"
    monkeypatch.setenv(CPU_KERNELS, "portable")
    native = find_native()
    assert native is None or describe_native() == f"native portable, {native.threads} threads"


def test_an_unknown_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_KERNELS, "sse9")
    if isinstance(find.find_library(), Missing):
        pytest.skip("no native kernels")
    with pytest.raises(ConfigError, match="sse9"):
        find_native()


def flags_with_bfloat16() -> str:
    """The text of /proc/cpuinfo. Skips the test on a processor without AVX512-BF16."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "avx512_bf16" not in flags:
        pytest.skip("the processor has no AVX512-BF16")
    return flags


def test_matrix_units_are_used_only_where_the_variable_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = flags_with_bfloat16()
    chosen = {}
    for limit in ("amx", "avx512bf16"):
        monkeypatch.setenv(CPU_KERNELS, limit)
        native = find_native()
        assert native is not None
        chosen[limit] = native.variant
    assert chosen == {"amx": "amx" if "amx_bf16" in flags else "avx512bf16", "avx512bf16": "avx512bf16"}


def test_without_a_measurement_the_processors_maker_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's bfloat16 products without matrix units are slower than float32 arithmetic."""
    flags = flags_with_bfloat16()
    monkeypatch.setattr(calibration, "choose", lambda *_: None)
    native = find_native()
    assert native is not None
    expected = "amx" if "amx_bf16" in flags else "avx512" if "GenuineIntel" in flags else "avx512bf16"
    assert native.variant == expected

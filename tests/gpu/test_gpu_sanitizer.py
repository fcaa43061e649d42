"""compute-sanitizer over the kernels that append to the cache and read it, and over those of quantized weights. The relay's
kernels have theirs beside them."""

from __future__ import annotations

from pathlib import Path

from support.gpu_suite import sanitized


def test_appending_and_attending_is_clean() -> None:
    tests = Path(__file__).with_name("test_gpu_attention.py")
    code, output = sanitized("-q", str(tests), "-k", "writes_only")
    assert code == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output


def test_products_on_quantized_weights_are_clean() -> None:
    tests = Path(__file__).with_name("test_gpu_quantized.py")
    code, output = sanitized("-q", str(tests), "-k", "groups_are_multiplied and not 4096 or rows_are_quantized or int8")
    assert code == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output

"""compute-sanitizer over the kernels that append to the cache and read it. The relay's kernels have theirs beside them."""

from __future__ import annotations

from pathlib import Path

from support.gpu_suite import sanitized


def test_appending_and_attending_is_clean() -> None:
    tests = Path(__file__).with_name("test_gpu_attention.py")
    code, output = sanitized("-q", str(tests), "-k", "writes_only")
    assert code == 0, output[-4000:]
    assert "ERROR SUMMARY: 0 errors" in output

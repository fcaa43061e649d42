"""`scripts/check-arm`: the native kernels, compiled for aarch64, under qemu: the choice of a variant, then the tests that
compare kernels with float64 and models with `transformers`. Exit code 1 if anything differs.

qemu computes as the processors do, but it keeps memory in order as x86 does, and its times say nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common.kernels.native.build import INSTALL_TIMEOUT_S, compile_library, library_name
from common.kernels.native.compiler import Compiler, find_compilers
from common.kernels.native.recipe import SOURCES, source_digest

_ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).parent
_MACHINE = "aarch64"
_BEST = {"max": "neonbf16", "neoverse-n1": "portable", "cortex-a72": "portable"}
"""By qemu's processor: the variant that is chosen there. neoverse-n1 has products of int8 but none of bfloat16."""
_TESTED = ("max", "neoverse-n1")
"""PyTorch's wheel does not run on cortex-a72."""
_CHOICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.kv_best_variant.restype = ctypes.c_char_p
print(library.kv_best_variant(sys.argv[2].encode()).decode())
"""
_UNIT = "tests/unit/common"
_EXACTNESS = f"{_UNIT}/engine/test_runner_exactness.py::"
_TESTS = (
    *(f"{_UNIT}/kernels/native/test_{name}.py" for name in ("kernels", "linear", "attention")),
    *(f"{_UNIT}/{name}.py" for name in ("attention/test_native", "attention/test_conformance")),
    f"{_UNIT}/engine/sampling/test_row_passes.py",
    *(f"{_UNIT}/model/lora/test_{name}.py" for name in ("products", "whole_layers")),
    f"{_UNIT}/model/test_native_stack.py",
    f"{_UNIT}/engine/test_native_step.py",
    f"{_EXACTNESS}test_layers_with_windows_on_the_native_kernels_match_transformers",
    f"{_EXACTNESS}test_bfloat16_stays_near_float32",
)
_OTHER_BACKENDS = "not sdpa and not flashinfer"
_TEST_S = 3600


def run(
    folder: Path, cpu: str, *arguments: str, stdout: int | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Debian's Python for aarch64 with `arguments` on qemu's processor `cpu`; `more`: further environment variables."""
    environ = {
        "QEMU_CPU": cpu,
        "QEMU_LD_PREFIX": str(folder / "root"),
        "PYTHONPATH": str(folder / "packages"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder / "home"),
        "PATH": "/nonexistent",  # with a compiler in sight, a library would have to be that one's
        "OMP_NUM_THREADS": "1",
        **more,
    }
    command = [shutil.which("qemu-aarch64-static") or "", str(folder / "root" / "usr" / "bin" / "python3"), *arguments]
    return subprocess.run(command, cwd=_ROOT, env=environ, stdout=stdout, text=True, check=False)


def _compiler() -> Compiler:
    """That of CXX, which `scripts/check-arm` sets."""
    [compiler] = find_compilers(os.environ)
    return compiler


def compile_for_arm(folder: Path) -> Path:
    """The library, in the cache where the emulated processes look for it; compiled if it is missing."""
    cache = folder / "cache" / "kvrelay" / "native"
    cache.mkdir(parents=True, exist_ok=True)
    digest = source_digest(SOURCES, _MACHINE)
    for old in cache.iterdir():
        if f"-{digest}-" in old.name:
            return old
        old.unlink()
    deadline_s = time.monotonic() + INSTALL_TIMEOUT_S
    with tempfile.TemporaryDirectory(dir=folder) as work:
        library = compile_library(_compiler(), Path(work), os.environ, deadline_s, machine=_MACHINE)
        return library.replace(cache / library_name(digest, "cross", library))


def wrong_choices(folder: Path, library: Path) -> list[str]:
    """Processors and limits for which another variant than the expected one is chosen."""
    mask = folder / "hide_int8_products.so"
    flags = ["-shared", "-fPIC", str(_HERE / "hide_int8_products.c"), "-o", str(mask)]
    subprocess.run([*_compiler().command, "-x", "c", *flags], check=True)
    cases = [(cpu, limit, best, "") for cpu, best in _BEST.items() for limit in ("", "neonbf16")]
    cases += [(cpu, "portable", "portable", "") for cpu in _BEST]
    cases.append(("max", "", "portable", str(mask)))
    wrong: list[str] = []
    for cpu, limit, expected, preload in cases:
        arguments = ("-c", _CHOICE, str(library), limit)
        found = run(folder, cpu, *arguments, stdout=subprocess.PIPE, LD_PRELOAD=preload).stdout.strip()
        what = f"{cpu}{' without int8 products' if preload else ''}, limit {limit or 'none'}: {found}"
        print(what, flush=True)
        if found != expected:
            wrong.append(f"{what}, not {expected}")
    return wrong


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/check-arm", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", action="append", help=f"qemu's name of a processor; default: {' and '.join(_TESTED)}")
    options, others = parser.parse_known_args()
    folder: Path = options.folder
    (folder / "home").mkdir(exist_ok=True)
    failed = wrong_choices(folder, compile_for_arm(folder))
    arguments = ["-v", "-p", "no:cacheprovider", "--timeout", str(_TEST_S), "-m", "not browser", "-k", _OTHER_BACKENDS]
    for cpu in options.cpu or _TESTED:
        print(f"tests on qemu's {cpu}", flush=True)
        if run(folder, cpu, "-m", "pytest", *arguments, *_TESTS, *others).returncode:
            failed.append(f"tests on {cpu}")
    print(f"failed: {'; '.join(failed)}" if failed else "aarch64: all as expected", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

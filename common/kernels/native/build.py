"""Finds or compiles the native library. No torch.

    python -m common.kernels.native.build     compile it now, if it is missing

A library's file name holds the digest of its sources, of its compiler and of its own content, so that a file of other
sources, of another compiler or a damaged one is never used. Wheels carry one in `prebuilt`; all others are in the
per-user cache. No request waits for a compiler: `scripts/install` runs this module, and a node that finds no library
compiles it before it loads its model.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.base.cache_folder import readable_folders, writable_folder
from common.base.errors import ConfigError
from common.base.files import locked
from common.base.logs import configure
from common.kernels.native.compiler import CompileFailed, Compiler, find_compilers, run_all
from common.kernels.native.recipe import SOURCES, make_recipe, platform_tag, source_digest, this_machine

log = logging.getLogger(__name__)

INSTALL_TIMEOUT_S = 600.0
_PREBUILT = Path(__file__).parent / "prebuilt"
_FOLDER = "native"
_LOCK = "lock"
"""A file of the cache's folder, locked by the process that compiles; it stays, because others may wait for it."""
_WORK_PREFIX = "compiling-"
_KEPT_FILES = 8
_PREFIX = "kvrelay-"
_SUFFIX = ".so"


@dataclass(frozen=True)
class Missing:
    """Why there is no native library."""

    reason: str


def native_folder() -> Path:
    """The cache's folder of compiled libraries; it exists then. Raises: ConfigError if no cache can be written."""
    return writable_folder(_FOLDER)


def find_library() -> Path | Missing:
    """The native library for these sources and this machine; never compiles. Milliseconds."""
    try:
        return _find(find_compilers(os.environ))
    except (OSError, ConfigError) as error:
        return Missing(str(error))


def build_library(timeout_s: float) -> Path | Missing:
    """The native library, compiled if it is missing. Of several processes that call this, one compiles and the others
    wait. Never raises; takes little longer than `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    try:
        compilers = find_compilers(os.environ)
        found = _find(compilers)
        if isinstance(found, Path) or not compilers:
            return found
        folder = native_folder()
        with locked(folder / _LOCK, deadline_s) as is_held:
            if not is_held:
                return _not_compiled(f"another process was still compiling after {timeout_s:.0f} s")
            found = _find(compilers)  # another process may have compiled it meanwhile
            return found if isinstance(found, Path) else _compile_any(compilers, folder, deadline_s)
    except (OSError, ConfigError) as error:
        return _not_compiled(str(error))


def clear_libraries() -> bool | None:
    """Remove all compiled libraries. Returns whether there were any; None, and nothing is removed, while a process compiles.

    Raises: OSError, ConfigError.
    """
    folder = native_folder()
    with locked(folder / _LOCK, 0.0) as is_held:
        if not is_held:
            return None
        entries = [entry for entry in folder.iterdir() if entry.name != _LOCK]
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        return bool(entries)


def _not_compiled(reason: str) -> Missing:
    log.warning("the native kernels cannot be compiled: %s", reason)
    return Missing(reason)


def _find(compilers: list[Compiler]) -> Path | Missing:
    """Look for a library made by these compilers. Raises: OSError, ConfigError."""
    source = source_digest(SOURCES, this_machine())
    candidates = [*_PREBUILT.glob(f"{_PREFIX}{source}-*{_SUFFIX}")]
    # Without a compiler: for example a service whose PATH is shorter than that of the installation.
    maker = _compiler_digest(compilers) if compilers else "*"
    for folder in readable_folders(_FOLDER):
        candidates += folder.glob(f"{_PREFIX}{source}-{maker}-*{_SUFFIX}")
    for candidate in candidates:
        if _is_intact(candidate):
            return candidate
    if compilers:
        return Missing("not compiled")
    named = os.environ.get("CXX")
    return Missing(f"no C++ compiler found{f': CXX names {named}' if named else ''}")


def _is_intact(library: Path) -> bool:
    expected = library.name.removesuffix(_SUFFIX).rpartition("-")[2]
    try:
        return _digest(library.read_bytes()) == expected
    except FileNotFoundError:  # just removed as old
        return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _compiler_digest(compilers: list[Compiler]) -> str:
    """Changes if any compiler is added, removed or updated; also if the C library is."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if platform.libc_ver()[0] == "glibc" else platform.release()
    return _digest(repr((libc, [compiler.identity for compiler in compilers])).encode())[:8]


def _compile_any(compilers: list[Compiler], folder: Path, deadline_s: float) -> Path | Missing:
    """The library by the first compiler that can, in `folder`, whose lock is held. Raises: OSError."""
    for left_behind in folder.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    reason = ""
    may_take_longer = deadline_s - time.monotonic() < INSTALL_TIMEOUT_S / 2
    for compiler in compilers:
        started_s = time.monotonic()
        # zig first compiles its own C++ runtime; the cache keeps that.
        usual = "about two minutes, the first time" if compiler.is_zig else "about half a minute"
        log.info("compiling native kernels with %s: %s", compiler.name, usual)
        try:
            with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=folder, ignore_cleanup_errors=True) as work:
                library = compile_library(compiler, Path(work), _environ(folder), deadline_s)
                kept = _keep(library, folder, _compiler_digest(compilers))
            log.info("native kernels compiled in %.0f s", time.monotonic() - started_s)
            return kept
        except CompileFailed as error:
            reason = reason or f"{compiler.name} cannot compile them: {error}"
            log.debug("%s: %s", compiler.name, error)
        if time.monotonic() > deadline_s:  # the next one would not be done either
            if may_take_longer:  # each later start would fail in the same way
                reason += (
                    f"; `{sys.executable} -m common.kernels.native.build` gives it ten minutes, once for all starts"
                )
            break
    return _not_compiled(reason)


def _environ(folder: Path) -> Mapping[str, str]:
    return {
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
        **os.environ,
        "LC_ALL": "C",
    }


def compile_library(
    compiler: Compiler,
    work: Path,
    environ: Mapping[str, str],
    deadline_s: float,
    *,
    machine: str | None = None,
    for_wheel: bool = False,
) -> Path:
    """Compile the library in the empty folder `work`, for `machine` (default: this one).

    Raises: CompileFailed; OSError.
    """
    recipe = make_recipe(compiler, SOURCES, machine or this_machine(), for_wheel=for_wheel)
    run_all(recipe.compile, work, environ, deadline_s)
    run_all([recipe.link], work, environ, deadline_s)
    return work / recipe.target


def _keep(library: Path, folder: Path, compiler_digest: str) -> Path:
    """Move a compiled library to its name in the cache, and remove the oldest ones."""
    source = source_digest(SOURCES, this_machine())
    kept = folder / library_name(source, compiler_digest, library)
    library.replace(kept)
    keep_newest(folder, f"{_PREFIX}*{_SUFFIX}")
    return kept


def keep_newest(folder: Path, pattern: str) -> None:
    """Remove all files of `folder` that match the pattern but the newest ones. Raises: OSError."""
    by_age = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[_KEPT_FILES:]:
        old.unlink(missing_ok=True)


def library_name(source: str, maker: str, library: Path) -> str:
    """The file name of a compiled library: its sources' digest, its maker and its content's digest."""
    return f"{_PREFIX}{source}-{maker}-{_digest(library.read_bytes())}{_SUFFIX}"


def build_for_wheel(work: Path, own_tag: str) -> tuple[Path, str]:
    """Compile a library in the empty folder `work`, under the name that it must have in a wheel's `prebuilt` folder.

    `own_tag`: platform tag of this system. Returns it and the wheel's platform tag. Raises: CompileFailed, also where
    there is no compiler; OSError.
    """
    compilers = find_compilers(os.environ)
    if not compilers:
        raise CompileFailed("no C++ compiler found; the package ziglang has one")
    machine = this_machine()
    deadline_s = time.monotonic() + INSTALL_TIMEOUT_S
    library = compile_library(compilers[0], work, _environ(work), deadline_s, for_wheel=True)
    named = library.rename(work / library_name(source_digest(SOURCES, machine), "wheel", library))
    return named, platform_tag(compilers[0], machine, own_tag)


def main() -> int:
    """`scripts/install`: the exit code says whether there is a library now."""
    configure("info")
    found = build_library(INSTALL_TIMEOUT_S)
    if isinstance(found, Missing):
        log.warning("no native kernels: %s", found.reason)
        return 1
    log.info("native kernels: %s", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

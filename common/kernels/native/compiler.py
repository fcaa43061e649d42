"""C++ compilers of this machine, and one compilation as a set of processes with a deadline. No torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.cores import usable_cores
from common.base.process import tied_command

_NAMES = ("c++", "g++", "clang++")
_POLL_S = 0.01
_MAX_MESSAGE_CHARS = 300


class CompileFailed(Exception):
    """A compiler reported an error, could not be run or was too slow; the message is one line."""


@dataclass(frozen=True)
class Compiler:
    """A command that compiles C++."""

    name: str
    """For messages: "g++", "zig"."""
    command: tuple[str, ...]
    identity: str
    """Differs between versions of the compiler. Found without running it."""
    is_zig: bool = False


def find_compilers(environ: Mapping[str, str]) -> list[Compiler]:
    """The compilers to try, best first: the one that CXX names and no other, or those on the PATH, then ziglang's."""
    named = shlex.split(environ.get("CXX", ""))
    if named:
        found = _on_path(named[0], tuple(named[1:]), environ)
        return [] if found is None else [found]
    compilers = [compiler for name in _NAMES if (compiler := _on_path(name, (), environ)) is not None]
    zig = _find_zig()
    return compilers if zig is None else [*compilers, zig]


def _on_path(name: str, arguments: tuple[str, ...], environ: Mapping[str, str]) -> Compiler | None:
    program = shutil.which(name, path=environ.get("PATH"))
    if program is None:
        return None
    status = os.stat(program)
    identity = f"{os.path.realpath(program)} {status.st_size} {status.st_mtime_ns} {' '.join(arguments)}"
    return Compiler(os.path.basename(name), (program, *arguments), identity)


def _find_zig() -> Compiler | None:
    """The compiler in the package `ziglang`, a clang with all headers and libraries that it needs."""
    spec = importlib.util.find_spec("ziglang")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        program = os.path.join(folder, "zig")
        if os.access(program, os.X_OK):
            return Compiler("zig", (program, "c++"), f"ziglang {importlib.metadata.version('ziglang')}", is_zig=True)
    return None


def run_all(commands: Sequence[Sequence[str]], folder: Path, environ: Mapping[str, str], deadline_s: float) -> None:
    """Run compiler commands in `folder`, one per core at a time, until `deadline_s` of `time.monotonic`.

    They end with this process. Raises: CompileFailed for the first one that fails, after ending the others.
    """
    waiting = list(enumerate(commands))
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < usable_cores():
                number, command = waiting.pop(0)
                running[number] = _start(command, folder, environ, _output_of(folder, number))
            for number, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[number]
                if process.returncode:
                    raise CompileFailed(_first_error(_output_of(folder, number), process.returncode))
            if time.monotonic() > deadline_s:
                raise CompileFailed("the compiler was not done in time")
            time.sleep(_POLL_S)
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _output_of(folder: Path, number: int) -> Path:
    return folder / f"output-{number}"


def _start(command: Sequence[str], folder: Path, environ: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as stream:
        return subprocess.Popen(
            tied_command(list(command)),
            cwd=folder,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _first_error(output: Path, return_code: int) -> str:
    lines = [line.strip() for line in output.read_text("utf-8", "replace").splitlines() if line.strip()]
    told = next((line for line in lines if "error: " in line), lines[-1] if lines else f"exit code {return_code}")
    return told[:_MAX_MESSAGE_CHARS]

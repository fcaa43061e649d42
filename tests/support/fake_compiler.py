"""A fake C++ compiler for tests: it writes the requested file at once, fails, or never ends."""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import pathlib, sys, time
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
{behaviour}
pathlib.Path(arguments[arguments.index("-o") + 1]).write_bytes(b"made of " + " ".join(arguments).encode())
"""
WORKS = ""
FAILS = "sys.exit('kernels.cpp:1: fatal error: it is too old')"
HANGS = "time.sleep(600)"


def install_compiler(folder: Path, behaviour: str = WORKS) -> Path:
    """Put `c++` into `folder`, which becomes a PATH. Returns the file that lists each call's arguments."""
    folder.mkdir(exist_ok=True)
    log = folder / "calls"
    log.touch()
    program = folder / "c++"
    program.write_text(_PROGRAM.format(python=sys.executable, log=str(log), behaviour=behaviour), "utf-8")
    program.chmod(0o755)
    return log

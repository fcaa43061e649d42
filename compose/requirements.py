"""Prints the requirements that the image installs: `requirements.py cpu|cuda`, run beside the files that declare them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

_EXTRAS = ("tls",)


def listed(variant: str) -> list[str]:
    """The requirements of the project, for CUDA also those of flashinfer's Python part."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for name in _EXTRAS for line in project["optional-dependencies"][name])]
    if variant == "cuda":
        lines = Path("gpu-requirements.txt").read_text("utf-8").partition("# flashinfer's own")[2].splitlines()[1:]
        wanted += [line for line in lines if line and not line.startswith("#")]
    return wanted


if __name__ == "__main__":
    print(*listed(sys.argv[1]), sep="\n")

"""What the image installs, for its Dockerfile: `requirements.py list cpu|cuda`, `requirements.py refuse-cuda REPORT`."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

_EXTRAS = ("tls",)
_NO_CUDA = """
PyTorch would come with gigabytes of CUDA libraries, which this image does not need. Set PIP_EXTRA_INDEX_URL to PyTorch's own
index of CPU builds: the --index-url that PyTorch's installation page shows for Linux, Pip and CPU. For an image with CUDA
set VARIANT=cuda.
"""


def listed(variant: str) -> list[str]:
    """The requirements of the project, and for CUDA those of flashinfer's Python part."""
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for name in _EXTRAS for line in project["optional-dependencies"][name])]
    if variant == "cuda":
        lines = Path("gpu-requirements.txt").read_text("utf-8").partition("# flashinfer's own")[2].splitlines()[1:]
        wanted += [line for line in lines if line and not line.startswith("#")]
    return wanted


def refuse_cuda(report: str) -> None:
    """End with a sentence if pip's report of a dry run names CUDA libraries."""
    entries = json.loads(Path(report).read_text("utf-8"))["install"]
    if any(entry["metadata"]["name"].startswith(("nvidia-", "cuda-")) for entry in entries):
        sys.exit(_NO_CUDA)


if __name__ == "__main__":
    if sys.argv[1] == "list":
        print(*listed(sys.argv[2]), sep="\n")
    else:
        refuse_cuda(sys.argv[2])

"""Finds out whether flashinfer can be used in this process. It is imported when needed, which takes seconds."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)
"""Compute capability below which there is no bfloat16."""


@dataclass(frozen=True)
class Library:
    """flashinfer, or the reason why it is not used."""

    flashinfer: ModuleType | None
    reason: str = ""


@functools.cache
def find_flashinfer(device: torch.device) -> Library:
    """flashinfer for `device`. Warns in the log, once, if a GPU has to do without it."""
    found = _find(device)
    if found.flashinfer is None and device.type == "cuda":
        log.warning("attention and norms run as plain PyTorch operations, which is slower: %s", found.reason)
    return found


def _find(device: torch.device) -> Library:
    if device.type != "cuda":
        return Library(None, f"flashinfer needs CUDA, not {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return Library(None, f"flashinfer needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}")
    # From 0.7 on, norms use another compiler if it is installed. Those with CUDA are precompiled.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    _find_ninja()
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        advice = "; pip install 'kvrelay[gpu]' brings it" if error.name == "flashinfer" else ""
        return Library(None, f"flashinfer cannot be imported: {error}{advice}")
    except (ImportError, OSError, RuntimeError) as error:
        return Library(None, f"flashinfer cannot be imported: {error}")
    log.info(
        "flashinfer %s: kernels that are not precompiled are compiled at first use, which takes minutes",
        flashinfer.__version__,
    )
    try:
        _run_one(flashinfer, device)
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return Library(None, f"flashinfer {flashinfer.__version__} cannot build or run its kernels: {error}")
    return Library(flashinfer)


def _find_ninja() -> None:
    """Put `ninja`, which flashinfer runs, on PATH. Its package installs it into the virtual environment's `bin`, which is
    on PATH only if that environment was activated."""
    if shutil.which("ninja") is not None:
        return
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja":
                folder = Path(str(file.locate())).resolve().parent
                os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(folder))))


def _run_one(flashinfer: ModuleType, device: torch.device) -> None:
    """Load or compile a small kernel, and run it: the compiler may be missing, or the kernels may be for another GPU."""
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    flashinfer.rmsnorm(x, x[0])
    torch.cuda.synchronize(device)

"""The tests that need a GPU. `scripts/gpu-check` runs them; the default run does not collect them.

Without a GPU the run ends before it begins, with one sentence: a GPU test that is skipped proves nothing.
"""

from __future__ import annotations

import importlib.metadata
import time
from multiprocessing import resource_tracker

import pytest
import torch
from support.gpu_suite import IS_GPU


def _missing_gpu() -> str | None:
    """Why no test can run here; None where they can."""
    if torch.cuda.is_available() or not IS_GPU:
        return None
    return f"tests/gpu needs an NVIDIA GPU that PyTorch can use; torch {torch.__version__} sees none here"


def pytest_sessionstart() -> None:
    missing = _missing_gpu()
    if missing is not None:
        pytest.exit(missing, returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reached without `pytest_sessionstart` where tests/gpu is collected as a part of something larger."""
    missing = _missing_gpu()
    if missing is not None and any("gpu" in item.path.parts for item in items):
        pytest.exit(missing, returncode=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The line that docs/gpu.md records."""
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    terminalreporter.line(f"{time.strftime('%Y-%m-%d')}: {gpu_in_words()}: {told}")


def gpu_in_words() -> str:
    """GPU, memory, versions: what every recorded figure stands beside."""
    if not torch.cuda.is_available():
        return "a dry run on a processor, which says nothing of a GPU"
    properties = torch.cuda.get_device_properties(0)
    try:
        flashinfer = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        flashinfer = "absent"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, flashinfer {flashinfer}"


@pytest.fixture(scope="session", autouse=True)
def tracker_running():
    """Python's helper of spawned processes, which lives as long as this one: no test has left it behind."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def memory_returned():
    """What a test left on the GPU is freed before the next one measures what is free."""
    yield
    if IS_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

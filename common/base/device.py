"""The device that a rank computes on, the dtype that it implies, and settings of torch. All are fixed once per process, before
a model loads.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from common.base.cores import usable_cores
from common.base.errors import ConfigError

DeviceKind = Literal["cpu", "cuda"]

CPU = torch.device("cpu")


def resolve_device(wanted: str) -> DeviceKind:
    """Return the device kind that `--device` means on this machine; "auto" is a GPU if PyTorch finds one.

    Raises: ConfigError if a GPU is requested and there is none.
    """
    if wanted == "cpu":
        return "cpu"
    if num_gpus() > 0:
        return "cuda"
    if wanted == "cuda":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(
            f"--device cuda: PyTorch {torch.__version__} {built} and finds no GPU; --device cpu needs none"
        )
    return "cpu"


@functools.cache
def num_gpus() -> int:
    """Number of CUDA GPUs that this process may use; CUDA_VISIBLE_DEVICES limits them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def rank_device(kind: DeviceKind, local_rank: int, ranks_here: int) -> torch.device:
    """The device of a node's rank number `local_rank` of `ranks_here` on this host. Each rank has a GPU of its own.

    Raises: ConfigError if there are fewer GPUs than ranks.
    """
    if kind == "cpu":
        return CPU
    if ranks_here > (gpus := num_gpus()):
        raise ConfigError(
            f"{ranks_here} ranks of one node need a GPU each, this process sees {gpus}: use fewer ranks, more hosts, "
            "or --device cpu"
        )
    return torch.device("cuda", local_rank)


def use_device(device: torch.device) -> None:
    """Make `device` the current GPU of the calling thread, for streams and for kernels of other libraries."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def default_dtype(saved: str, kind: DeviceKind) -> str:
    """The dtype that `--dtype auto` means for a model saved in `saved`. It is never float32 on a GPU."""
    return "bfloat16" if kind == "cuda" and saved == "float32" else saved


def gpu_name(device: torch.device) -> str:
    """The name that the driver reports for the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def configure_torch(threads: int | None) -> int:
    """Set how many threads operations use (None: torch's choice, at most the usable cores), and flush denormals to zero. Returns the
    thread count.

    Denormal activations would make elementwise operations tens of times slower.
    """
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()) if threads is None else threads)
    torch.set_flush_denormal(True)
    return torch.get_num_threads()

"""The device that a rank computes on, and the dtype that it implies. Chosen once per process, before a model loads."""

from __future__ import annotations

import functools
from typing import Literal

import torch

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


def rank_device(kind: DeviceKind, local_rank: int, ranks_here: int, gpus: int | None = None) -> torch.device:
    """The device of a node's rank number `local_rank` of `ranks_here` on this host. Each rank has a GPU of its own.

    `gpus`: the number of GPUs; None counts them. Raises: ConfigError if there are fewer GPUs than ranks.
    """
    if kind == "cpu":
        return CPU
    gpus = num_gpus() if gpus is None else gpus
    if ranks_here > gpus:
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

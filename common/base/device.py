"""Where a rank computes: the device, and what follows from it. Settled once per process, before a model loads."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from common.base.errors import ConfigError

DeviceKind = Literal["cpu", "cuda"]

CPU = torch.device("cpu")


def resolve_device(wanted: str) -> DeviceKind:
    """`--device` as it is on this machine: "auto" is a card where PyTorch finds one.

    Raises: ConfigError if a card is wanted and there is none.
    """
    if wanted == "cpu":
        return "cpu"
    if num_cards() > 0:
        return "cuda"
    if wanted == "cuda":
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(
            f"--device cuda: PyTorch {torch.__version__} {built} and finds no card; --device cpu needs none"
        )
    return "cpu"


@functools.cache
def num_cards() -> int:
    """CUDA cards that this process may use; CUDA_VISIBLE_DEVICES narrows them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def rank_device(kind: DeviceKind, local_rank: int, ranks_here: int, cards: int | None = None) -> torch.device:
    """The device of a node's `local_rank`-th of `ranks_here` ranks on this host: each has a card of its own.

    Raises: ConfigError where there are fewer of the `cards` (None: what this machine has) than ranks.
    """
    if kind == "cpu":
        return CPU
    cards = num_cards() if cards is None else cards
    if ranks_here > cards:
        raise ConfigError(
            f"{ranks_here} ranks of one node need a card each, this process sees {cards}: use fewer ranks, more hosts, "
            "or --device cpu"
        )
    return torch.device("cuda", local_rank)


def use_device(device: torch.device) -> None:
    """Make a card the calling thread's own, for what does not say where it runs: streams, kernels of other libraries."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def default_dtype(saved: str, kind: DeviceKind) -> str:
    """What `--dtype auto` means for a model that was saved in `saved`: on a card never float32."""
    return "bfloat16" if kind == "cuda" and saved == "float32" else saved


def card_name(device: torch.device) -> str:
    """What the driver calls the card, "cpu" for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

"""Which of a machine's CUDA cards each node of `kvrelay up` gets, and how much of them. No torch, no driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALL_NODES = 0.9
"""Of a card's memory, for all nodes on it together, where nobody says how much."""


@dataclass(frozen=True)
class NodeCards:
    """One node's cards, and the part of each that it may take by default."""

    visible: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""
    utilization: float


def find_cards(environ: Mapping[str, str]) -> list[str]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, by default all of this machine."""
    names = [entry.name for entry in Path("/dev").iterdir()] if Path("/dev").is_dir() else []
    return visible_cards(environ.get(VISIBLE), names)


def visible_cards(wanted: str | None, device_files: Iterable[str]) -> list[str]:
    """`wanted`: what CUDA_VISIBLE_DEVICES says, None where it is not set. Like CUDA, stops at the first -1."""
    cards = [str(i) for i, _ in enumerate(name for name in device_files if re.fullmatch(r"nvidia\d+", name))]
    if wanted is None or not cards:
        return cards
    chosen = [name.strip() for name in wanted.split(",")]
    end = next((i for i, name in enumerate(chosen) if name in ("", "-1")), len(chosen))
    return chosen[:end]


def share_cards(cards: list[str], ranks: list[int]) -> list[NodeCards | None]:
    """Cards for nodes of so many `ranks` each, in turn: every rank of a node its own, none shared while some are free.

    A node with more ranks than there are cards gets them all, and says itself that they do not do. None without cards.
    """
    if not cards:
        return [None] * len(ranks)
    taken = [0] * len(cards)
    places: list[list[int]] = []
    for count in ranks:
        # The least used first; among equals in order, so that a node's cards are neighbours.
        places.append(sorted(range(len(cards)), key=lambda card: (taken[card], card))[:count])
        for card in places[-1]:
            taken[card] += 1
    return [
        NodeCards(
            tuple(cards[card] for card in sorted(place)), round(_ALL_NODES / max(taken[card] for card in place), 4)
        )
        for place in places
    ]

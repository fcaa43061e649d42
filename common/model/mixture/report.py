"""What operators see of the experts on a stage's ranks. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLayer:
    """One mixture."""

    layer: int
    loads: list[int]
    """Rows that each rank's experts computed since experts of this layer moved last."""
    slots: list[list[int]]
    """For each rank, the experts in its slots."""


@dataclass(frozen=True)
class ExpertPlan:
    """The outcome of one look at the loads."""

    at: float
    """Seconds since the epoch."""
    layers: list[int]
    """The layers whose experts move."""
    moved: int
    """Slots that take another expert, in all of these layers."""
    reason: str


@dataclass(frozen=True)
class ExpertReport:
    """All mixtures of one stage, and its last plans, the oldest first."""

    layers: list[ExpertLayer]
    plans: list[ExpertPlan]
    pending: int
    """Layers of the last plan whose turn is still to come."""

"""`top_p`: only the nucleus, the shortest leading part that holds this share of the probability; ties with its last stay."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.device_inputs import column_to_device
from common.engine.sampling.ranking import ranked
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep, Row
from common.engine.sampling.top_k_top_p import nucleus_edge
from common.engine.step import SampleSpec

_DEPTHS = (4.0, 8.0)
"""Distances below the maximum logit; the nucleus is searched in these first, then in the whole vocabulary."""
_FEW = 4096
"""Values that are sorted in about the time of one pass over a vocabulary."""
_PARTS_OF_ONE = 8
"""Values are put into 256 parts of width 1 / 8; only the part with the nucleus's edge is sorted."""


class TopP(LogitsStep):
    """Leaves the nucleus of the tokens that the cut leaves."""

    filters = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.params.top_p < 1.0]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        row.candidates = _nucleus(row.scaled(), spec.params.top_p, row.cut)

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        rows.apply_cut()
        top_p = column_to_device([spec.params.top_p for spec in rows.specs], rows.device)
        edge = nucleus_edge(rows.values, top_p, rows.thresholds)
        rows.values = torch.where((top_p >= 1.0) | (rows.values >= edge), rows.values, -torch.inf)


def _nucleus(scaled: Row, top_p: float, cut: float) -> NDArray[np.int64]:
    """Ids of the shortest leading part that holds `top_p` of what `cut` leaves."""
    if cut > -math.inf:
        ids, weights = ranked(scaled, cut)
        return ids[_leading(weights, top_p * float(weights.sum()))]
    everything = np.exp(scaled)
    needed = top_p * float(everything.sum(dtype=np.float64))
    for depth in _DEPTHS:  # sorting the values near the maximum is enough where they are few and hold it
        if np.count_nonzero(scaled >= -depth) > _FEW:
            break
        ids, weights = ranked(scaled, -depth)
        if weights.sum() >= needed:
            return ids[_leading(weights, needed)]
    parts = np.minimum(scaled * -_PARTS_OF_ONE, 255.0).astype(np.uint8)
    held = np.bincount(parts, everything, 256).cumsum()
    edge = int(np.searchsorted(held, min(needed, float(held[-1]))))  # two sums of one row may differ in their last bits
    before = float(held[edge - 1]) if edge else 0.0
    of_edge = np.flatnonzero(parts == edge)
    order = np.argsort(-scaled[of_edge], kind="stable")
    last = _leading(np.exp(scaled[of_edge[order]].astype(np.float64)), needed - before)
    return np.concatenate([np.flatnonzero(parts < edge), of_edge[order[last]]])


def _leading(weights: NDArray[np.float64], needed: float) -> NDArray[np.bool_]:
    """Which of `weights`, highest first, are in the shortest leading part that sums to `needed`; ties with its last are."""
    last = min(int(np.searchsorted(np.cumsum(weights), needed)), weights.size - 1)
    return weights >= weights[last]

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

_NUCLEUS_DEPTHS = (4.0, 8.0, 16.0)
"""Depths below the maximum at which a nucleus is looked for before the whole vocabulary is sorted."""


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
    ids, weights = ranked(scaled, -_NUCLEUS_DEPTHS[0] if cut == -math.inf else cut)
    needed = top_p * float(weights.sum())
    if cut == -math.inf:  # sorting the values near the maximum is enough where they hold it
        needed = top_p * float(np.exp(scaled).sum(dtype=np.float64))
        for depth in (*_NUCLEUS_DEPTHS[1:], math.inf):
            if weights.sum() >= needed:
                break
            ids, weights = ranked(scaled, -depth)
    last = min(int(np.searchsorted(np.cumsum(weights), needed)), ids.size - 1)
    return ids[weights >= weights[last]]

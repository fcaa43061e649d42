"""`top_k`: only the k most likely tokens. Ties with the k-th stay, as in vLLM."""

from __future__ import annotations

import numpy as np
import torch

from common.engine.device_inputs import to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class TopK(LogitsStep):
    """Raises the cut to the k-th value. min_p only ever removes a tail, so the two cuts combine by max."""

    filters = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if 0 < spec.params.top_k < vocab]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        kth = row.values.size - spec.params.top_k
        row.cut = max(row.cut, float(np.partition(row.scaled(), kth)[kth]))

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        vocab = rows.values.size(1)
        counts = [top_k if 0 < (top_k := spec.params.top_k) < vocab else vocab for spec in rows.specs]
        count = to_device(counts, rows.device)[:, None]
        kth = rows.thresholds.of_count(rows.values, count)
        cut = torch.full_like(kth, -torch.inf) if rows.cut is None else rows.cut
        rows.cut = torch.where(count < vocab, cut.maximum(kth), cut)

"""`top_k`: only the k most likely tokens. Ties with the k-th stay, as in vLLM."""

from __future__ import annotations

import numpy as np
import torch

from common.control.messages import SamplingParams
from common.engine.device_inputs import to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class TopK(LogitsStep):
    """Raises the cut to the k-th value. min_p only ever removes a tail, so the two cuts combine by max."""

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        top_k, vocab = spec.params.top_k, row.values.size
        if 0 < top_k < vocab:
            row.cut = max(row.cut, float(np.partition(row.values, vocab - top_k)[vocab - top_k]))

    def on_device(self, rows: DeviceRows) -> None:
        vocab = rows.values.size(1)
        counts = [top_k if 0 < (top_k := spec.params.top_k) < vocab else vocab for spec in rows.specs]
        if min(counts) == vocab:
            return
        count = to_device(counts, rows.device)[:, None]
        kth = rows.thresholds.of_count(rows.values, count)
        cut = torch.full_like(kth, -torch.inf) if rows.cut is None else rows.cut
        rows.cut = torch.where(count < vocab, cut.maximum(kth), cut)

    def filters(self, params: SamplingParams, vocab: int) -> bool:
        return 0 < params.top_k < vocab

"""`temperature`: logits less their maximum, divided by it. From here on values are scaled."""

from __future__ import annotations

import math

import numpy as np
import torch

from common.engine.device_inputs import column_to_device
from common.engine.sampling.base import GREEDY_BELOW
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class Temperature(LogitsStep):
    """Scales random draws. Temperatures below `GREEDY_BELOW` are greedy."""

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.params.temperature >= GREEDY_BELOW]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        best = row.argmax()
        top = float(row.values[best])
        if math.isfinite(top):
            row.top, row.temperature = top, spec.params.temperature
        else:
            row.the_token, row.none_left = best, top == -math.inf
            row.values = np.zeros_like(row.values)

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        """A row whose maximum is not finite becomes all zero: with NaN a kernel may hang or return a bad index."""
        top = rows.values.gather(1, rows.most_likely[:, None])
        temperature = column_to_device([spec.params.temperature for spec in rows.specs], rows.device).float()
        rows.values = torch.where(top.isfinite(), (rows.values - top) / temperature, 0.0)

"""`temperature`: logits less their maximum, divided by it. From here on values are scaled."""

from __future__ import annotations

import numpy as np
import torch

from common.engine.device_inputs import column_to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class Temperature(LogitsStep):
    """Scales random draws."""

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        row.values = (row.values - row.top) / np.float32(spec.params.temperature)

    def on_device(self, rows: DeviceRows) -> None:
        """A row whose maximum is not finite becomes all zero: no kernel promises an end or an index in range for NaN."""
        top = rows.values.gather(1, rows.most_likely[:, None])
        temperature = column_to_device([spec.params.temperature for spec in rows.specs], rows.device).float()
        rows.values = torch.where(top.isfinite(), (rows.values - top) / temperature, 0.0)

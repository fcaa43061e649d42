"""`min_p`: no token whose probability is less than this part of the highest."""

from __future__ import annotations

import math

from common.engine.device_inputs import column_to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class MinP(LogitsStep):
    """Raises the cut to log(min_p), as the maximum is 0."""

    filters = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.params.min_p > 0.0]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        row.cut = min(0.0, math.log(spec.params.min_p))

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        bounds = [spec.params.min_p for spec in rows.specs]
        cuts = [min(0.0, math.log(bound)) if bound > 0.0 else -math.inf for bound in bounds]
        rows.cut = column_to_device(cuts, rows.device).float()

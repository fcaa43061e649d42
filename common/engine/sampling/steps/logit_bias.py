"""`logit_bias`: what a request adds to single logits."""

from __future__ import annotations

import numpy as np

from common.engine.device_inputs import array_to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep, places
from common.engine.step import SampleSpec


class LogitBias(LogitsStep):
    """Adds; ids outside of the vocabulary are ignored."""

    for_greedy = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.params.logit_bias]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        for token_id, bias in spec.params.logit_bias:
            if 0 <= token_id < row.raw.size:
                row.writable()[token_id] += np.float32(bias)

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        vocab = rows.raw.size(1)
        biases = [
            (index, token_id, bias)
            for index in asked
            for token_id, bias in rows.specs[index].params.logit_bias
            if 0 <= token_id < vocab
        ]
        if biases:
            values = array_to_device(np.array([bias for _, _, bias in biases], np.float32), rows.device)
            at = places([(index, token_id) for index, token_id, _ in biases], rows.device)
            rows.writable().index_put_(at, values, accumulate=True)

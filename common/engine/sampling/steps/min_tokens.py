"""No stop token before `min_tokens` tokens are generated."""

from __future__ import annotations

import math

import numpy as np

from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.sampling.steps.places import places
from common.engine.step import SampleSpec


class MinTokens(LogitsStep):
    """-inf for the stop ids."""

    for_greedy = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.num_generated < spec.params.min_tokens]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        banned = [token_id for token_id in spec.params.stop_token_ids if 0 <= token_id < row.raw.size]
        if banned:
            row.writable()[banned] = -np.inf

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        vocab = rows.raw.size(1)
        banned = [
            (index, token_id)
            for index in asked
            for token_id in rows.specs[index].params.stop_token_ids
            if 0 <= token_id < vocab
        ]
        if banned:
            rows.writable().index_put_(places(banned, rows.device), rows.raw.new_full((), -math.inf))

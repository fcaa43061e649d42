"""Single tokens that cannot be drawn: stop tokens before `min_tokens`, and the ends of bad words."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep, places
from common.engine.step import SampleSpec


class _Bans(LogitsStep):
    """-inf for some tokens; ids outside of the vocabulary are ignored."""

    for_greedy = True

    @abstractmethod
    def _banned(self, spec: SampleSpec) -> list[int]:
        """The tokens banned at a draw that needs the step."""

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        banned = [token_id for token_id in self._banned(spec) if 0 <= token_id < row.raw.size]
        if banned:
            row.writable()[banned] = -np.inf

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        vocab = rows.raw.size(1)
        banned = [
            (index, token_id)
            for index in asked
            for token_id in self._banned(rows.specs[index])
            if 0 <= token_id < vocab
        ]
        if banned:
            rows.writable().index_put_(places(banned, rows.device), rows.raw.new_full((), -math.inf))


class BadWords(_Bans):
    """Bans `SampleSpec.banned`."""

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.banned]

    def _banned(self, spec: SampleSpec) -> list[int]:
        return spec.banned


class MinTokens(_Bans):
    """Bans the stop ids before `min_tokens` tokens are generated."""

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.num_generated < spec.params.min_tokens]

    def _banned(self, spec: SampleSpec) -> list[int]:
        return spec.params.stop_token_ids

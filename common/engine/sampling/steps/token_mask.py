"""Only the tokens that a draw's mask allows (`SampleSpec.mask`)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.device_inputs import array_to_device, to_device
from common.engine.sampling.steps.base import DeviceRows, HostRow, LogitsStep
from common.engine.step import SampleSpec


class TokenMask(LogitsStep):
    """-inf for tokens whose bit is not set, and for those past the end of the mask."""

    for_greedy = True

    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        return [index for index, spec in enumerate(specs) if spec.mask is not None]

    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        values = row.scratch
        row.passes.mask(row.values, spec.mask or b"", values)
        row.values = values

    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        vocab = rows.raw.size(1)
        words = np.stack([_words(rows.specs[index].mask or b"", vocab) for index in asked])
        shifts = torch.arange(32, dtype=torch.int32, device=rows.device)
        allowed = (array_to_device(words, rows.device)[:, :, None] >> shifts & 1).flatten(1)[:, :vocab] > 0
        index = to_device(asked, rows.device)
        values = rows.writable()
        values.index_copy_(0, index, torch.where(allowed, values.index_select(0, index), -torch.inf))


def _words(mask: bytes, vocab: int) -> NDArray[np.int32]:
    """Words for exactly `vocab` tokens."""
    words = np.zeros(-(-vocab // 32), np.int32)
    given = np.frombuffer(mask, np.int32)[: words.size]
    words[: given.size] = given
    return words

"""One step of logits processing, in NumPy for one row on the host and in tensors for all rows on a device.

Both forms must give the same result: the same request gives the same token wherever it is drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.engine.device_inputs import to_device
from common.engine.sampling.row_passes import Row, RowPasses
from common.engine.sampling.top_k_top_p import Thresholds
from common.engine.step import SampleSpec


class HostRow:
    """One row on its way from logits to a token."""

    def __init__(self, raw: Row, best: int, scratch: Row, passes: RowPasses) -> None:
        """raw: [vocab], what the model computed, never changed; its maximum is at `best`. scratch: [vocab], for changed
        logits: fresh memory for each row would cost more than the changes."""
        self.raw = raw
        self.scratch = scratch
        self.passes = passes
        self._best = best
        self.values = raw
        """[vocab], `raw` itself until the first change."""
        self.top, self.temperature = 0.0, 1.0
        """From `Temperature` on: the maximum of `values`, which no later step changes, and what they are divided by."""
        self._scaled: Row | None = None
        self.the_token: int | None = None
        """The token, if it is determined without a random number."""
        self.none_left = False
        """Whether a random draw found all tokens masked or banned."""
        self.cut = -math.inf
        """Scaled values below this cannot be drawn."""
        self.candidates: NDArray[np.int64] | None = None
        """The only tokens that can be drawn; None: all that `cut` leaves."""

    def writable(self) -> Row:
        """`values`, as a copy of its own."""
        if self.values is self.raw:
            self.values = self.scratch
            np.copyto(self.values, self.raw)
        return self.values

    def scaled(self) -> Row:
        """`values` less their maximum, divided by the temperature."""
        if self._scaled is None:
            self._scaled = (self.values - np.float32(self.top)) / np.float32(self.temperature)
        return self._scaled

    def argmax(self) -> int:
        """The most likely token."""
        return self._best if self.values is self.raw else int(self.values.argmax())


class DeviceRows:
    """Rows of one step on their way from logits to tokens."""

    def __init__(self, raw: Tensor, specs: list[SampleSpec], unseen: Tensor | None, thresholds: Thresholds) -> None:
        """unseen: see `common.engine.sampling.base.Sampler.sample`."""
        self.raw = raw
        """[n, vocab] float32, what the model computed; never changed."""
        self.values = raw
        """[n, vocab], `raw` itself until the first change. `Temperature` scales it, so that each row's maximum is 0."""
        self.specs = specs
        self.unseen = unseen
        self.thresholds = thresholds
        self.most_likely = torch.empty(0, dtype=torch.int64)
        """[n], of `values` before scaling."""
        self.cut: Tensor | None = None
        """[n, 1], values below cannot be drawn; None: all can."""

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def writable(self) -> Tensor:
        """`values`, as a copy of their own."""
        if self.values is self.raw:
            self.values = self.raw.clone()
        return self.values

    def apply_cut(self) -> None:
        """-inf for values below `cut`."""
        if self.cut is not None:
            self.values = torch.where(self.values >= self.cut, self.values, -torch.inf)
            self.cut = None


def places(entries: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Single logits of a batch as indices on the device. `entries`: (row, token id). Returns both columns, [entries] int64 each."""
    return to_device([row for row, _ in entries], device), to_device([token_id for _, token_id in entries], device)


class LogitsStep(ABC):
    """Changes logits, or leaves out tokens, where a request's parameters ask for it."""

    for_greedy = False
    """Whether it may change which logit is the highest, so that greedy draws need it as well."""
    filters = False
    """Whether it leaves out tokens of random draws."""

    @abstractmethod
    def asked_for(self, specs: list[SampleSpec], vocab: int) -> list[int]:
        """Indices of the draws that need it."""

    @abstractmethod
    def on_host(self, row: HostRow, spec: SampleSpec) -> None:
        """Apply the step to one draw that needs it."""

    @abstractmethod
    def on_device(self, rows: DeviceRows, asked: list[int]) -> None:
        """Apply the step to a batch in which the draws `asked`, at least one, need it."""

"""Evens out the experts' load among the ranks of a stage while they serve. Engine thread, between two steps.

All ranks of a stage have counted the same rows. The first of them plans and announces; then all move the experts of one layer
together. A plan of several layers takes a turn for each, so that no step waits for more than one layer.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Mapping

import torch

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError
from common.model.mixture.moving import form_of, move_experts
from common.model.mixture.placement import Placement, imbalance
from common.model.mixture.report import ExpertLayer, ExpertPlan, ExpertReport
from common.model.mixture.slots import ExpertSlots
from common.parallel.mesh import Mesh

MIN_INTERVAL_S = 60.0
"""Between two plans: no expert moves twice in this time."""
PICKS_PER_EXPERT = 100
"""Rows that a layer must have given to its experts, on average, before it is planned: fewer would be noise."""
_MIN_GAIN = 0.05
"""A layer's experts move only if that lowers its imbalance by this part."""
_MAX_PLANS = 10


class Rebalancer:
    """One rank's part. Invariant: between steps, all ranks of the stage have the same placement of every layer."""

    def __init__(
        self, layers: Mapping[int, ExpertSlots], mesh: Mesh, threshold: float, clock: Clock = monotonic
    ) -> None:
        """`layers`: this stage's mixtures, by layer. `threshold`: imbalance of a layer above which its experts move. All ranks of
        the node do this at the same time.

        Raises: ConfigError for experts that cannot be moved, or whose form differs among layers' slots or ranks; RankLost.
        """
        self._layers = dict(layers)
        self._mesh = mesh
        self._threshold = threshold
        self._clock = clock
        self._plans_at_s = clock()
        self._pending: dict[int, Placement] = {}
        self._plans: deque[ExpertPlan] = deque(maxlen=_MAX_PLANS)
        self._is_reported = True
        self._plans_here = mesh.place.tp_rank == 0
        self._agree_on_forms()

    def _agree_on_forms(self) -> None:
        text = str({number: form_of(layer) for number, layer in self._layers.items()})
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)
        if not torch.equal(self._mesh.all_reduce(digest.clone()), digest * self._mesh.place.tp_size):
            raise ConfigError("--rebalance-experts needs experts of one form, but ranks hold them in different formats")

    @torch.inference_mode()
    def take_turn(self) -> None:
        """Move the experts of one layer if a plan says so. All ranks of the stage do this together. Raises: RankLost."""
        widest = max(len(layer.placement.slots) for layer in self._layers.values())
        device = next(iter(self._layers.values())).counts.device
        words = torch.zeros(1 + widest, device=device)  # float32 holds numbers of layers and experts exactly
        if self._plans_here:
            if not self._pending:
                self._plan()
            self._is_reported = False
            if self._pending:
                number = min(self._pending)
                slots = self._pending.pop(number).slots
                words[: 1 + len(slots)] = torch.tensor([number + 1, *slots])
        number, *slots = self._mesh.all_reduce(words).long().tolist()
        if number:
            layer = self._layers[number - 1]
            present = layer.placement
            new = Placement(present.num_experts, present.num_ranks, tuple(slots[: len(present.slots)]))
            move_experts(self._mesh, layer, new)

    def _plan(self) -> None:
        now_s = self._clock()
        if now_s < self._plans_at_s:
            return
        layers = self._layers.values()
        if any(int(each.counts.sum()) < PICKS_PER_EXPERT * each.placement.num_experts for each in layers):
            return
        counts = {number: layer.counts.tolist() for number, layer in self._layers.items()}
        self._plans_at_s = now_s + MIN_INTERVAL_S
        before = {number: imbalance(layer.rank_loads()) for number, layer in self._layers.items()}
        after: dict[int, float] = {}
        moved = 0
        for number, layer in self._layers.items():
            if before[number] <= self._threshold:
                continue
            new = layer.placement.balanced(counts[number])
            expected = imbalance(new.loads(counts[number]))
            if expected <= before[number] * (1 - _MIN_GAIN):
                self._pending[number] = new
                after[number] = expected
                moved += len(layer.placement.moves_to(new))
        worst = max(before.values())
        if after:
            reason = (
                f"load max over mean up to {worst:.2f}, expected {max(after.values()):.2f} in the layers that change"
            )
        elif worst <= self._threshold:
            reason = f"nothing to do: load max over mean up to {worst:.2f}, threshold {self._threshold:g}"
        else:
            reason = (
                f"nothing to gain: load max over mean up to {worst:.2f}, and no placement is {_MIN_GAIN:.0%} better"
            )
        if self._plans and not self._plans[-1].moved:
            self._plans.pop()
        self._plans.append(ExpertPlan(time.time(), sorted(after), moved, reason))

    def news(self) -> ExpertReport | None:
        """`report`, once after each turn, on the rank that plans; else None."""
        is_reported, self._is_reported = self._is_reported, True
        return None if is_reported else self.report()

    def report(self) -> ExpertReport:
        """The present loads and the last plans."""
        layers = [
            ExpertLayer(number, layer.rank_loads(), layer.placement.by_rank())
            for number, layer in sorted(self._layers.items())
        ]
        return ExpertReport(layers, list(self._plans), len(self._pending))

"""What serving costs in seconds, learned online from what the nodes report. Pure: no I/O, no clock.

Runs in the router process, on its event loop. All nodes of one role share three straight lines,

    prefill  = base + token * computed + context * computed * (tokens before each of them, on average)
    transfer = base + byte * bytes            (what a relay adds once the prompt is computed)
    step     = base + seq * running           (one decode step)

fitted by least squares with forgetting and a prior. Each node has a factor on each line, a running mean of observed over
expected. So an unmeasured node costs as much as the fleet on average, and one outlier has little effect: once a line has
settled, observations are clamped to between a quarter and four times the expected value. Non-finite observations are
ignored; one would corrupt every estimate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

_FORGETTING = 0.995
"""Factor on the weight of older observations per new one: about the last 200 count."""
_PRIOR_WEIGHT = 0.1
"""Weight of the prior, in observations."""
_BAND = 4.0
_SETTLED = 20
"""Observations after which `_BAND` applies; before that, the prior may be wrong by orders of magnitude."""
_FIT_EVERY = 16
"""Once settled, observations per fit."""
_WELL_KNOWN, _ENTER_EVERY = 100, 4
"""After `_WELL_KNOWN` observations only one in `_ENTER_EVERY` is used: a router makes thousands per second."""
_TINY = 1e-300
"""Replaces a pivot that rounding made zero."""
_NODE_GAIN = 0.1
"""Share of a node's factor that one observation replaces; the first observations replace more."""
_OUTPUT_GAIN = 0.02


@dataclass
class Costs:
    """Coefficients that all nodes of one role share. The defaults are the priors.

    Only `CostModel` changes them, in place: a copy per answer would cost more than the learning itself.
    """

    prefill_base_s: float = 0.004
    """Per prompt."""
    prefill_token_s: float = 0.0005
    """Per prompt token computed."""
    prefill_context_s: float = 0.0
    """Attention: per computed token and token before it."""
    transfer_base_s: float = 0.02
    """Per relay."""
    transfer_byte_s: float = 1e-9
    step_base_s: float = 0.02
    """Per decode step."""
    step_seq_s: float = 0.0005
    """Per running sequence."""
    queued_token_s: float = 0.0005
    """Per queued prompt token: the inverse of a busy node's throughput."""
    output_tokens: float = 128.0
    """Usual length of an answer."""
    prefills: int = 0
    """Number of prefills measured."""
    steps: int = 0
    """Number of step reports measured."""


class Line:
    """Non-negative least squares over observations and a prior; older observations are forgotten.

    Each observation weighs 1 / expected squared, so that relative errors count.
    """

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        """`scales`: the typical size of each input, which determines the weight of the prior."""
        self.values = [float(value) for value in prior]
        self.count = 0
        expected = self.at(scales)
        self._prior = [_PRIOR_WEIGHT * (scale / expected) ** 2 for scale in scales]
        self._prior_values = list(self.values)
        self._gram = [[0.0] * len(prior) for _ in prior]
        self._pull = [0.0] * len(prior)

    def at(self, inputs: Sequence[float]) -> float:
        """The expected value, above zero."""
        return max(sum(map(mul, self.values, inputs)), 1e-9)

    def learn(self, inputs: Sequence[float], value: float) -> bool:
        """Enter one observation. Returns whether `values` changed."""
        self.count += 1
        if self.count > _WELL_KNOWN and self.count % _ENTER_EVERY:
            return False
        expected = self.at(inputs)
        if self.count > _SETTLED:
            value = min(max(value, expected / _BAND), expected * _BAND)
        weight = 1 / max(expected, value) ** 2
        for i, (row, one) in enumerate(zip(self._gram, inputs, strict=True)):  # NumPy is slow for so few numbers
            weighted = weight * one
            row[:] = [old * _FORGETTING + weighted * other for old, other in zip(row, inputs, strict=True)]
            self._pull[i] = self._pull[i] * _FORGETTING + weighted * value
        due = self.count < _SETTLED or self.count % _FIT_EVERY == 0
        if due:
            self._fit()
        return due

    def _fit(self) -> None:
        """Solve; inputs whose coefficient would be negative are left out."""
        used = list(range(len(self._prior)))
        solved = self._solve(used)
        while min(solved) < 0 and len(used) > 1:
            del used[solved.index(min(solved))]
            solved = self._solve(used)
        self.values = [0.0] * len(self._prior)
        for place, value in zip(used, solved, strict=True):
            self.values[place] = max(value, 0.0)

    def _solve(self, used: list[int]) -> list[float]:
        """The best coefficients of these inputs, by Gaussian elimination: 20 times as fast as NumPy for two or three inputs."""
        rows = [
            [*(self._gram[i][j] for j in used), self._pull[i] + self._prior[i] * self._prior_values[i]] for i in used
        ]
        for i, row in enumerate(rows):
            row[i] += self._prior[used[i]]
        for i, pivot in enumerate(rows):
            for row in rows[i + 1 :]:
                ratio = row[i] / (pivot[i] or _TINY)
                row[:] = [value - ratio * above for value, above in zip(row, pivot, strict=True)]
        solved: list[float] = []
        for i in reversed(range(len(rows))):
            row = rows[i]
            solved.insert(0, (row[-1] - sum(map(mul, row[i + 1 : -1], solved))) / (row[i] or _TINY))
        return solved


@dataclass
class Factor:
    """A node's times relative to the fleet's: a running mean of ratios on a logarithmic scale."""

    log: float = 0.0
    count: int = 0
    value: float = 1.0
    """The mean ratio itself."""

    def learn(self, ratio: float) -> None:
        """Enter observed / expected."""
        self.count += 1
        limit = math.log(_BAND) if self.count > 3 else math.log(1000.0)
        step = min(max(math.log(max(ratio, 1e-9)) - self.log, -limit), limit)
        self.log += max(_NODE_GAIN, 1 / (self.count + 1)) * step
        self.value = math.exp(self.log)


@dataclass
class _NodeFactors:
    prefill: Factor = field(default_factory=Factor)
    link: Factor = field(default_factory=Factor)
    step: Factor = field(default_factory=Factor)


_USUAL = (1.0, 1.0, 1.0)


class CostModel:
    """Learns the costs of one role's nodes. `costs` and the nodes' factors go into a `Fleet`."""

    def __init__(self) -> None:
        self.costs = costs = Costs()
        self._prefill = Line(
            (costs.prefill_base_s, costs.prefill_token_s, costs.prefill_context_s), (1.0, 500.0, 500.0 * 500.0)
        )
        self._transfer = Line((costs.transfer_base_s, costs.transfer_byte_s), (1.0, 1e7))
        self._step = Line((costs.step_base_s, costs.step_seq_s), (1.0, 8.0))
        self._busy_s = self._busy_tokens = 0.0
        self._nodes: defaultdict[str, _NodeFactors] = defaultdict(_NodeFactors)

    # -- observations

    def prefilled(self, incarnation: str, tokens: int, context: int, seconds: float) -> bool:
        """A node computed `tokens` after `context` cached tokens in `seconds`. Returns whether something was learned."""
        if tokens <= 0 or not 0 < seconds < math.inf:
            return False
        inputs = (1.0, float(tokens), tokens * (context + tokens / 2))
        if self._learn(self._prefill, self._nodes[incarnation].prefill, inputs, seconds):
            costs = self.costs
            costs.prefill_base_s, costs.prefill_token_s, costs.prefill_context_s = self._prefill.values
            costs.prefills = self._prefill.count
            if self._busy_tokens == 0:
                costs.queued_token_s = self._prefill.at(inputs) / tokens
        return True

    def relayed(self, incarnation: str, size_bytes: int, seconds: float) -> bool:
        """A relay of `size_bytes` ended `seconds` after the prompt was computed. Returns whether something was learned."""
        if size_bytes <= 0 or not math.isfinite(seconds):
            return False
        inputs = (1.0, float(size_bytes))
        if self._learn(self._transfer, self._nodes[incarnation].link, inputs, max(seconds, 1e-6)):
            self.costs.transfer_base_s, self.costs.transfer_byte_s = self._transfer.values
        return True

    def stepped(self, incarnation: str, running: int, seconds: float) -> None:
        """A decode node's steps with `running` sequences take `seconds`."""
        if running <= 0 or not 0 < seconds < math.inf:
            return
        if self._learn(self._step, self._nodes[incarnation].step, (1.0, float(running)), seconds):
            self.costs.step_base_s, self.costs.step_seq_s = self._step.values
            self.costs.steps = self._step.count

    def computed(self, tokens: int, busy_s: float) -> None:
        """A node computed `tokens` of prompts while it was busy with prompts for `busy_s`."""
        if tokens > 0 and 0 < busy_s < math.inf:
            keep = 0.98
            self._busy_s = self._busy_s * keep + busy_s
            self._busy_tokens = self._busy_tokens * keep + tokens
            self.costs.queued_token_s = self._busy_s / self._busy_tokens

    def answered(self, tokens: int) -> None:
        """An answer ended after `tokens` tokens."""
        self.costs.output_tokens += _OUTPUT_GAIN * (tokens - self.costs.output_tokens)

    def drop(self, incarnation: str) -> None:
        """This incarnation is gone."""
        self._nodes.pop(incarnation, None)

    def factors(self, incarnation: str) -> tuple[float, float, float]:
        """(`slowness`, `link_slowness`, `step_slowness`) of a node."""
        node = self._nodes.get(incarnation)
        return _USUAL if node is None else (node.prefill.value, node.link.value, node.step.value)

    # -- inside

    @staticmethod
    def _learn(line: Line, factor: Factor, inputs: Sequence[float], seconds: float) -> bool:
        factor.learn(seconds / line.at(inputs))
        return line.learn(inputs, seconds)

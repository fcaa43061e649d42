"""Where an attempt goes and why, for the dispatcher and, as JSON, for whoever asks. Pure.

Runs in the router process, on its event loop.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple

PrefillMode = Literal["relayed", "local"]

SHOWN_CANDIDATES = 8
"""Of each leg's candidates, so many of the best are named in an answer's headers."""


class Picked(NamedTuple):
    """The node that one leg goes to."""

    node_id: str
    incarnation: str
    hit_tokens: int = 0
    """Leading tokens of the request whose KV it is known to hold."""
    work_s: float = 0.0
    """Estimated prefill work of the request there."""


class LegDecision(NamedTuple):
    """A picked node, and the scores that it was picked by (lower is better), by node id, best first."""

    picked: Picked
    scores: dict[str, float]

    def to_json(self, candidates: int | None) -> str:
        """For `Decision.weighed`, with so many of the scores; None: all."""
        scores = [f"{_quoted(name)}:{score:.6g}" for name, score in self.scores.items()][:candidates]
        return (
            f'{{"node":{_quoted(self.picked.node_id)},"hit":{self.picked.hit_tokens},"scores":{{{",".join(scores)}}}}}'
        )


class Decision(NamedTuple):
    """Where an attempt goes and why."""

    policy: str
    mode: PrefillMode
    reason: str
    decode: LegDecision
    prefill: LegDecision | None = None
    ttft_s: float = 0.0
    """Estimated time to the first token, the relay included."""
    tpot_s: float = 0.0
    """Estimated time per token after it."""

    def explain(self) -> dict[str, Any]:
        """The decision as plain data for logs and traces."""
        return {"policy": self.policy, "mode": self.mode, "reason": self.reason, **json.loads(self._weighed(None))}

    def weighed(self, max_chars: int | None = None) -> str:
        """What was weighed: the estimates, and each leg's node, hit and candidates; as compact JSON, in ASCII. Where that is
        too long, candidates are left out, the worst first, then all.
        """
        for candidates in (None, *range(SHOWN_CANDIDATES - 1, -1, -1)):
            text = self._weighed(candidates)
            if max_chars is None or len(text) <= max_chars:
                return text
        return "{}"

    def _weighed(self, candidates: int | None) -> str:
        """With so many candidates of each leg; None: all. Figures have six digits. Written by hand: it goes into every
        answer's headers.
        """
        prefill = "" if self.prefill is None else f'"prefill":{self.prefill.to_json(candidates)},'
        return (
            f'{{"ttft_s":{self.ttft_s:.6g},"tpot_s":{self.tpot_s:.6g},'
            f'{prefill}"decode":{self.decode.to_json(candidates)}}}'
        )

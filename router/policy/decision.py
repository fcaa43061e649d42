"""Where an attempt goes and why, for the router itself and as JSON for operators. Pure; router process, event loop."""

from __future__ import annotations

import json
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal

PrefillMode = Literal["relayed", "local"]

SHOWN_CANDIDATES = 8
"""Number of best candidates per leg that an answer's headers name."""


@dataclass(slots=True)
class LegDecision:
    """The node picked for one leg."""

    node_id: str
    incarnation: str
    scores: dict[str, float]
    """Those of the candidates by node id, best (lowest) first."""
    hit_tokens: int = 0
    """Leading tokens of the request whose KV the node is known to have cached."""
    work_s: float = 0.0
    """Estimated duration of the request's prefill there."""

    def to_json(self, candidates: int | None) -> str:
        """For `Decision.weighed`, with the first `candidates` scores; None: all."""
        scores = [f"{_quoted(name)}:{score:.6g}" for name, score in self.scores.items()][:candidates]
        return f'{{"node":{_quoted(self.node_id)},"hit":{self.hit_tokens},"scores":{{{",".join(scores)}}}}}'


@dataclass(slots=True)
class Decision:
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
        """The estimates, and each leg's node, hit and candidates, as compact ASCII JSON.

        If that is longer than `max_chars`, candidates are left out, the worst first; if still too long, everything.
        """
        for candidates in (None, *range(SHOWN_CANDIDATES - 1, -1, -1)):
            text = self._weighed(candidates)
            if max_chars is None or len(text) <= max_chars:
                return text
        return "{}"

    def _weighed(self, candidates: int | None) -> str:
        """`weighed` with `candidates` per leg; None: all. Built by hand, because it is in the headers of every answer."""
        prefill = "" if self.prefill is None else f'"prefill":{self.prefill.to_json(candidates)},'
        return (
            f'{{"ttft_s":{self.ttft_s:.6g},"tpot_s":{self.tpot_s:.6g},'
            f'{prefill}"decode":{self.decode.to_json(candidates)}}}'
        )

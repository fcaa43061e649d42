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


class Choice(NamedTuple):
    """A picked node, and the scores that it was picked by (lower is better), by node id, best first."""

    picked: Picked
    scores: dict[str, float]

    def to_json(self, candidates: int | None) -> str:
        """For `Decision.to_json`, with so many of the scores; None: all."""
        scores = [f"{_quoted(name)}:{score:.6g}" for name, score in self.scores.items()][:candidates]
        return (
            f'{{"node":{_quoted(self.picked.node_id)},"hit":{self.picked.hit_tokens},"scores":{{{",".join(scores)}}}}}'
        )


class Decision(NamedTuple):
    """Where an attempt goes and why."""

    policy: str
    mode: PrefillMode
    reason: str
    decode: Choice
    prefill: Choice | None = None
    ttft_s: float = 0.0
    """Estimated time to the first token, the relay included."""
    tpot_s: float = 0.0
    """Estimated time per token after it."""

    def explain(self) -> dict[str, Any]:
        """The decision as plain data for logs and traces."""
        return json.loads(self._json(None))

    def to_json(self, max_chars: int | None = None) -> str:
        """The decision, compact, in ASCII. What makes it too long is left out: candidates, the worst first, then all else
        that is long.
        """
        text = self._json(None)
        if max_chars is None or len(text) <= max_chars:
            return text
        for count in range(SHOWN_CANDIDATES - 1, -1, -1):
            text = self._json(count)
            if len(text) <= max_chars:
                return text
        return f'{{"policy":{_quoted(self.policy)},"mode":"{self.mode}"}}'

    def _json(self, candidates: int | None) -> str:
        """With so many candidates of each leg; None: all. Seconds and scores with six digits. Written by hand: it goes into
        every answer's headers.
        """
        prefill = "" if self.prefill is None else f'"prefill":{self.prefill.to_json(candidates)},'
        return (
            f'{{"policy":{_quoted(self.policy)},"mode":"{self.mode}","reason":{_quoted(self.reason)},'
            f'"ttft_s":{self.ttft_s:.6g},"tpot_s":{self.tpot_s:.6g},'
            f'{prefill}"decode":{self.decode.to_json(candidates)}}}'
        )

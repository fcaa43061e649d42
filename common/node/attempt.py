"""What a node's core keeps of an attempt in either role, and the messages with its tokens. Engine thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.control.item_count import SENT_ITEMS
from common.control.links import Identity
from common.control.messages import AttemptStats, TokenChunk, items_of
from common.control.node_reports import Mark
from common.engine.scheduled_step import SequenceOutput
from common.engine.sequence import Sequence

_MAX_MARKS = 300


@dataclass(eq=False)
class Attempt:
    """State of an attempt that both roles keep."""

    identity: Identity
    """The router that sent the request."""
    seq: Sequence
    deadline_s: float
    grammar_deadline_s: float = field(default=math.inf, init=False)
    """When it gives up waiting for its grammar."""
    timeline: tuple[Mark, ...] = field(default=(), init=False)

    def mark(self, name: str, now_s: float, number: int = 0) -> None:
        """Add to the timeline, if the request asked for one."""
        if self.seq.request.timeline and len(self.timeline) < _MAX_MARKS:
            self.timeline += (Mark(name, now_s - self.seq.arrival_s, number),)

    def mark_layers(self, layers: Iterable[tuple[int, float]]) -> None:
        """Add when each layer had arrived, in seconds after the grant."""
        granted_s = next((mark.at_s for mark in self.timeline if mark.name == "grant"), 0.0) + self.seq.arrival_s
        for layer, after_s in sorted(layers, key=lambda each: each[1]):
            self.mark("layer", granted_s + after_s, layer)


def token_chunk(done: SequenceOutput, stats: AttemptStats | None) -> TokenChunk:
    """The message with a step's new tokens for the router."""
    seq, tokens = done.seq, done.tokens
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None] or None
    token_ids = [token.token_id for token in tokens]
    start, preemptions = seq.tokens.num_generated - len(tokens), seq.preemptions if done.finish_reason else 0
    chunk = TokenChunk(seq.key, start, token_ids, logprobs, done.finish_reason, stats, preemptions=preemptions)
    return chunk._replace(drafted=done.drafted, accepted=done.accepted) if done.drafted else chunk


def prompt_chunks(done: SequenceOutput) -> Iterator[TokenChunk]:
    """The messages with a step's log-probabilities of prompt tokens for the router; there is at least one."""
    found = done.prompt_logprobs
    before = done.seq.progress.num_scored - len(found)
    size = max(1, SENT_ITEMS // items_of(1, len(found[0].top_ids), len(found[0].whole)))
    for start in range(0, len(found), size):
        yield TokenChunk(done.seq.key, before + start, [], prompt_logprobs=found[start : start + size])

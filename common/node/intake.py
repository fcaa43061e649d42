"""From a request message to a checked `Sequence`: the same for both roles."""

from __future__ import annotations

from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.errors import BadRequest, Overloaded
from common.hashing import root_hash
from common.protocol import DecodeRequest, PrefillRequest


def make_sequence(
    request: PrefillRequest | DecodeRequest,
    *,
    scheduler: Scheduler,
    fingerprint: str,
    vocab_size: int,
    accepted: int,
    max_accepted: int,
    now_s: float,
) -> Sequence:
    """The sequence of `request`, if this node can ever run it.

    Raises: BadRequest for token ids or lengths that cannot be, Overloaded when `accepted` attempts fill the node.
    """
    if accepted >= max_accepted:
        raise Overloaded(f"this node has accepted {accepted} requests, its bound")
    if not request.token_ids:
        raise BadRequest("the prompt has no tokens")
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
        raise BadRequest(f"a token id lies outside the vocabulary of {vocab_size}")
    if not 0 < request.prompt_len <= len(request.token_ids) or request.sampling.max_tokens < 1:
        raise BadRequest("prompt_len or max_tokens is out of range")
    sequence = Sequence(
        key=request.key,
        token_ids=list(request.token_ids),
        prompt_len=request.prompt_len,
        sampling=request.sampling,
        root=root_hash(fingerprint, cache_salt=request.cache_salt),
        arrival_s=now_s,
        priority=request.priority,
        relays=isinstance(request, PrefillRequest),
    )
    scheduler.check_fits(sequence)
    return sequence

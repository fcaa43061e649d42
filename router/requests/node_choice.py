"""The nodes that a generation's attempts go to: what is asked of the policies, and what is counted at the chosen nodes.

Runs on the router's event loop. When an attempt is placed is decided by the request's machine (`placed_request.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common.control.identities import pack_ids
from router.policy import Decision, Query
from router.requests import flow_events as f
from router.requests.placement import HashChain, Placement
from router.requests.request import GenerationRequest
from router.requests.router_state import RouterState


class NodeChoice:
    """The choices of one generation. `token_ids` is everywhere what it has generated so far."""

    __slots__ = ("_chain", "_kv_kind", "_placement", "_request", "_router", "_unproven", "placement")

    def __init__(self, request: GenerationRequest, router: RouterState) -> None:
        self._request = request
        self._router = router
        self._chain = HashChain(request.engine.cache_salt, request.engine.lora_id)
        self._placement: Placement | None = None
        """The latest choice."""
        self.placement: Placement | None = None
        """The latest choice that got an attempt."""
        self._kv_kind = ""
        """KV kind of the node that generates, or generated, the first token."""
        self._unproven: set[str] = set()
        """Incarnations that got the prompt but have not reported yet: the blocks expected there may be missing."""

    def query(self, choose: f.Choose, token_ids: Sequence[int]) -> Query:
        """What is to be placed; `choose` writes the hits."""
        engine = self._request.engine
        return Query(
            len(engine.prompt_ids) + len(token_ids),
            avoid=choose.avoid | self._router.breakers.not_admitted(),
            last=choose.last,
            max_new_tokens=engine.sampling.max_tokens - len(token_ids),
            open_ended=self._request.open_ended,
            session=self._request.session,
            kv_kind=self._kv_kind if token_ids else "",
            begun=choose.begun,
            adapter=engine.adapter,
        )

    def choose(self, query: Query, token_ids: list[int]) -> Decision:
        """Pick nodes. Raises: Unavailable if there are none."""
        all_ids = self._request.engine.prompt_ids + pack_ids(token_ids)
        names = partial(self._chain.hashes, token_ids=all_ids)
        self._placement = self._router.placer.decide(query, names, self._unproven)
        return self._placement.decision

    def found(self, timeout_s: float) -> f.Found:
        """The answer that names the nodes of the latest choice."""
        assert self._placement is not None
        nodes, decision = self._router.nodes, self._placement.decision
        decode = nodes.get(decision.decode.incarnation)
        prefill = None if decision.prefill is None else nodes.get(decision.prefill.incarnation)
        assert decode is not None
        return f.Found(None if prefill is None else prefill.record.peer, decode.record.peer, timeout_s)

    def admit(self, token_ids: Sequence[int]) -> Decision:
        """The nodes of the latest choice get an attempt."""
        self.placement = placement = self._placement
        assert placement is not None
        router, decision = self._router, placement.decision
        incarnations = [leg.incarnation for leg in (decision.prefill, decision.decode) if leg is not None]
        for incarnation in incarnations:
            router.breakers.chosen(incarnation)
        self._unproven.update(incarnations)
        router.placer.expect(placement, incarnations)
        if not token_ids:
            decode = router.nodes.get(incarnations[-1])
            self._kv_kind = "" if decode is None else decode.kv_kind
        return decision

    def reported(self, incarnation: str) -> None:
        """A leg reported its first tokens: this node has the blocks that were expected there."""
        self._unproven.discard(incarnation)

"""Placing attempts: what the router knows of blocks, loads and costs, brought before the policies; and what it learns.

Router process, event loop. `decide` changes nothing but the policy's memory, so that it can be asked what it would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.base.hashing import BLOCK_SIZE, BlockHash, hash_blocks, root_hash
from common.control.messages import AttemptStats, NodeLoad, Role
from router.index.block_table import Keys
from router.index.prefix_index import PrefixIndex, block_keys
from router.nodes.node_table import Node, NodeTable
from router.policy import Decision, Memory, Query, check_policy, place
from router.policy.costs import CostModel
from router.policy.decision import SHOWN_CANDIDATES, LegDecision
from router.policy.dry_run import dry_run
from router.requests.admission import Objectives


@dataclass
class HashChain:
    """The block hashes of one request's tokens, extended as it grows; each is computed once."""

    cache_salt: str = ""
    _fingerprint: str = ""
    _hashes: list[BlockHash] = field(default_factory=lambda: [])

    def hashes(self, fingerprint: str, token_ids: Sequence[int]) -> list[BlockHash]:
        """Of the full blocks of `token_ids`, which begin with what was given before."""
        if fingerprint != self._fingerprint:
            self._fingerprint, self._hashes = fingerprint, []
        root = root_hash(fingerprint, cache_salt=self.cache_salt)
        self._hashes = hash_blocks(root, token_ids, parents=self._hashes)
        return self._hashes


class PlacementRequest(NamedTuple):
    """What is to be placed."""

    token_ids: Sequence[int]
    chain: HashChain
    max_new_tokens: int = 0
    session: str = ""
    avoid: frozenset[str] = frozenset()
    last: bool = False
    unproven: frozenset[str] = frozenset()
    """Incarnations whose hits do not count: they are expected of an attempt of this request that may have failed."""
    kv_kind: str = ""
    """Of the nodes that generated what it has of its answer."""
    begun: bool = False
    """It was given to nodes before: one that drains takes it where no other is left."""


class Placement(NamedTuple):
    """A decision, and what each leg asks of its node."""

    decision: Decision
    keys: Keys
    """Of the prompt's full blocks, in the index."""
    num_tokens: int
    max_new_tokens: int

    def leg(self, incarnation: str) -> tuple[float, int, float]:
        """(prompt tokens to compute, KV blocks to hold, prefill work in seconds) at this incarnation."""
        source, target = self.decision.prefill, self.decision.decode
        if source is not None and source.picked.incarnation == incarnation:
            return self._uncached(source), -(-self.num_tokens // BLOCK_SIZE), source.picked.work_s
        tokens = self._uncached(target) if source is None else 0.0
        return tokens, -(-(self.num_tokens + self.max_new_tokens) // BLOCK_SIZE), 0.0

    def _uncached(self, choice: LegDecision) -> float:
        return float(max(self.num_tokens - choice.picked.hit_tokens, 1))


class Placer:
    """Places attempts over the fleets of a `NodeTable`.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(
        self,
        nodes: NodeTable,
        index: PrefixIndex,
        *,
        policy: str,
        local_prefill_tokens: int | None,
        memory: Memory | None = None,
    ) -> None:
        self.policy = check_policy(policy)
        self.index = index
        self.models: dict[Role, CostModel] = {"prefill": CostModel(), "decode": CostModel()}
        self._nodes = nodes
        self._local_prefill_tokens = local_prefill_tokens
        self._memory = memory or Memory()
        self._loads: dict[str, NodeLoad] = {}
        for role, model in self.models.items():
            nodes.fleets[role].costs = model.costs
        nodes.finishing.costs = nodes.fleets["decode"].costs

    def decide(self, order: PlacementRequest, *, shown_count: int | None = SHOWN_CANDIDATES) -> Placement:
        """Pick nodes. `shown_count`: candidates that the decision names per leg; None: all.

        Raises: Unavailable when there is no decode node.
        """
        fleets = self._nodes.fleets
        decode = fleets["decode"]
        if order.begun and not decode.nodes:
            decode = self._nodes.finishing
        query, keys = self._query(order)
        decision = place(
            query,
            fleets["prefill"],
            decode,
            policy=self.policy,
            local_prefill_tokens=self._local_prefill_tokens,
            memory=self._memory,
            shown_count=shown_count,
        )
        usual = int(decode.costs.output_tokens)
        return Placement(decision, keys, query.num_tokens, min(order.max_new_tokens, usual))

    def explain(self, order: PlacementRequest, objectives: Objectives, held: int) -> dict[str, Any]:
        """What `decide` would decide now, with every candidate, and what a new request would meet with so many held
        back; the policy's memory and the index stay as they are.
        """
        fleets = self._nodes.fleets
        return dry_run(
            self._query(order, touch=False)[0],
            fleets["prefill"],
            fleets["decode"],
            policy=self.policy,
            local_prefill_tokens=self._local_prefill_tokens,
            memory=self._memory,
            objectives=objectives,
            held=held,
        )

    def _query(self, order: PlacementRequest, *, touch: bool = True) -> tuple[Query, Keys]:
        """What the policies are asked, and the index' keys of the prompt's full blocks."""
        hashes = order.chain.hashes(self._fingerprint(), order.token_ids)
        keys = block_keys(hashes)
        hits = self.index.match(keys, touch=touch)
        if order.unproven:
            hits = hits.without(order.unproven)
        query = Query(
            num_tokens=len(order.token_ids),
            avoid=order.avoid,
            last=order.last,
            hits=hits,
            max_new_tokens=order.max_new_tokens,
            session=order.session or (hashes[0].hex() if hashes else ""),
            kv_kind=order.kv_kind,
        )
        return query, keys

    def expect(self, placement: Placement, incarnations: list[str]) -> None:
        """These nodes will soon hold the blocks of what was placed there: the request's siblings may count on it."""
        first, *others = incarnations
        self.index.expect(first, placement.keys, *others)

    def _fingerprint(self) -> str:
        for role in ("decode", "prefill"):
            incarnations = self._nodes.fleets[role].incarnations
            node = self._nodes.get(incarnations[0]) if incarnations else None
            if node is not None:
                return node.record.layout.fingerprint
        return ""

    # -- learning

    def reported(self, role: Role, incarnation: str, stats: AttemptStats) -> None:
        """A leg says how it served its attempt."""
        model = self.models[role]
        learned = model.prefilled(incarnation, stats.computed_tokens, stats.cached_tokens, stats.prefill_s)
        if role == "decode":
            learned |= model.relayed(incarnation, stats.relayed_bytes, stats.transfer_s)
        if learned:
            self._tell(role, incarnation)

    def load_changed(self, node: Node) -> None:
        """A pong came."""
        role, load, model = node.record.role, node.load, self.models[node.record.role]
        before = self._loads.get(node.incarnation, load)
        self._loads[node.incarnation] = load
        model.computed(load.prompt_tokens - before.prompt_tokens, load.prompt_busy_s - before.prompt_busy_s)
        if role == "decode" and load.generated_tokens > before.generated_tokens:
            model.stepped(node.incarnation, load.running, load.step_s)
        self._tell(role, node.incarnation)

    def answered(self, tokens: int) -> None:
        """An answer is complete."""
        self.models["decode"].answered(tokens)

    def keep(self, incarnations: set[str]) -> None:
        """Forget all other nodes."""
        for gone in self._loads.keys() - incarnations:
            del self._loads[gone]
            for model in self.models.values():
                model.drop(gone)

    def _tell(self, role: Role, incarnation: str) -> None:
        """Bring what was learned into the fleet's columns."""
        fleet, model = self._nodes.fleets[role], self.models[role]
        fleet.update(
            incarnation,
            slowness=model.slowness(incarnation),
            link_slowness=model.link_slowness(incarnation),
            step_slowness=model.step_slowness(incarnation),
        )

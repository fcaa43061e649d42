"""Placing attempts: gives the policies what the router knows about blocks, loads and costs, and learns from reports.

Router process, event loop. `decide` changes only the policies' memory and the index's use stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.base.errors import Unavailable
from common.base.hashing import BLOCK_SIZE, BlockHash, hash_blocks, root_hash
from common.control.messages import AttemptStats, NodeLoad, Role
from router.index.block_table import KeyArray
from router.index.prefix_index import PrefixIndex, block_keys
from router.nodes.fleets import ModelFleets
from router.nodes.node import Node
from router.nodes.node_table import NodeTable
from router.policy import Decision, Fleet, Memory, Query, Routing, find_policy, place, with_adapter
from router.policy.costs import CostModel
from router.policy.decision import SHOWN_CANDIDATES, LegDecision
from router.requests.admission import Objectives
from router.requests.dry_run import dry_run

BlockNames = Callable[[str], Sequence[BlockHash]]
"""The hashes of the full blocks of one request's tokens, for nodes whose KV has the given fingerprint."""


@dataclass
class HashChain:
    """The block hashes of one request's tokens, extended as the request grows; each is computed once."""

    cache_salt: str = ""
    lora_id: str = ""
    """The `Adapter.lora_id` that the hashes of its blocks begin with; empty without an adapter."""
    _fingerprint: str = ""
    _hashes: list[BlockHash] = field(default_factory=lambda: [])

    def hashes(self, fingerprint: str, token_ids: Sequence[int]) -> list[BlockHash]:
        """Hashes of the full blocks of `token_ids`, which must begin with the tokens of the last call."""
        if fingerprint != self._fingerprint:
            self._fingerprint, self._hashes = fingerprint, []
        root = root_hash(fingerprint, cache_salt=self.cache_salt, lora_id=self.lora_id)
        self._hashes = hash_blocks(root, token_ids, parents=self._hashes)
        return self._hashes


@dataclass(slots=True, eq=False)
class Placement:
    """A decision, and the work of each leg."""

    decision: Decision
    keys: KeyArray
    """Index keys of the prompt's full blocks."""
    num_tokens: int
    max_new_tokens: int
    block_size: int = BLOCK_SIZE

    def leg(self, incarnation: str) -> tuple[float, int, float]:
        """(prompt tokens to compute, KV blocks to hold, prefill work in seconds) at this incarnation."""
        source, target, block = self.decision.prefill, self.decision.decode, self.block_size
        if source is not None and source.incarnation == incarnation:
            return self._uncached(source), -(-self.num_tokens // block), source.work_s
        tokens = self._uncached(target) if source is None else 0.0
        return tokens, -(-(self.num_tokens + self.max_new_tokens) // block), 0.0

    def _uncached(self, leg: LegDecision) -> float:
        return float(max(self.num_tokens - leg.hit_tokens, 1))


class Placer:
    """Places attempts over the nodes of one model.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(
        self,
        nodes: NodeTable,
        fleets: ModelFleets,
        index: PrefixIndex,
        *,
        policy: str,
        local_prefill_tokens: int | None,
        memory: Memory | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.index = index
        self.models: dict[Role, CostModel] = {"prefill": CostModel(), "decode": CostModel()}
        self._nodes = nodes
        self._fleets = fleets
        self._routing = Routing(find_policy(policy), local_prefill_tokens, memory or Memory())
        self._block_size = block_size
        self._loads: dict[str, NodeLoad] = {}
        for role, model in self.models.items():
            fleets.by_role[role].costs = model.costs
        fleets.finishing.costs = self.models["decode"].costs

    def decide(
        self,
        query: Query,
        names: BlockNames,
        unproven: Collection[str] = (),
        *,
        shown_count: int | None = SHOWN_CANDIDATES,
    ) -> Placement:
        """Pick nodes for an attempt whose blocks have these names; writes `query.hits`.

        `unproven`: incarnations whose prefix hits do not count, because their blocks are only expected, from an attempt of this
        request that may have failed. `shown_count`: candidates that the decision names per leg; None: all.

        Raises: Unavailable when there is no decode node.
        """
        prefill, decode = self._candidates(query)
        keys = self._look_up(query, names, unproven)
        decision = place(query, prefill, decode, self._routing, shown_count=shown_count)
        usual = int(decode.costs.output_tokens)
        return Placement(decision, keys, query.num_tokens, min(query.max_new_tokens, usual), self._block_size)

    def explain(self, query: Query, names: BlockNames, objectives: Objectives, queued: int) -> dict[str, Any]:
        """What `decide` would decide now (`dry_run`). Changes neither the policies' memory nor the index."""
        prefill, decode = self._candidates(query)
        self._look_up(query, names, touch=False)
        return dry_run(query, prefill, decode, self._routing, objectives, queued)

    def _candidates(self, query: Query) -> tuple[Fleet, Fleet]:
        """The prefill nodes and the decode nodes that may get the request. Raises: Unavailable if none has its adapter."""
        fleets, adapter = self._fleets.by_role, query.adapter
        prefill, decode = fleets["prefill"], self._fleets.decode(begun=query.begun)
        if adapter is None:
            return prefill, decode
        able = with_adapter(decode, adapter)
        if query.begun and not able.incarnations:
            able = with_adapter(self._fleets.finishing, adapter)
        if decode.incarnations and not able.incarnations:
            raise Unavailable(f"no decode node has LoRA adapter {adapter.name!r} now; try again")
        return with_adapter(prefill, adapter), able

    def _look_up(
        self, query: Query, names: BlockNames, unproven: Collection[str] = (), *, touch: bool = True
    ) -> KeyArray:
        """Write the prefix hits into the query. Returns the index keys of the full blocks."""
        hashes = names(self._fingerprint())
        keys = block_keys(hashes)
        hits = self.index.match(keys, touch=touch)
        query.hits = hits.without(unproven) if unproven else hits
        query.block_size = self._block_size
        query.session = query.session or (hashes[0].hex() if hashes else "")
        return keys

    def expect(self, placement: Placement, incarnations: list[str]) -> None:
        """These nodes will soon hold the request's blocks: similar requests that arrive meanwhile go there, too."""
        first, *others = incarnations
        self.index.expect(first, placement.keys, *others)

    def _fingerprint(self) -> str:
        for role in ("decode", "prefill"):
            incarnations = self._fleets.by_role[role].incarnations
            node = self._nodes.get(incarnations[0]) if incarnations else None
            if node is not None:
                return node.record.layout.fingerprint
        return ""

    # -- learning

    def reported(self, role: Role, incarnation: str, stats: AttemptStats) -> None:
        """Learn from a leg's report of how it served its attempt."""
        model = self.models[role]
        learned = model.prefilled(incarnation, stats.computed_tokens, stats.cached_tokens, stats.prefill_s)
        if role == "decode":
            learned |= model.relayed(incarnation, stats.relayed_bytes, stats.transfer_s)
        if learned:
            self._update_fleet(role, incarnation)

    def load_changed(self, node: Node) -> None:
        """Learn from a node's new load report."""
        role, load, model = node.record.role, node.load, self.models[node.record.role]
        before = self._loads.get(node.incarnation, load)
        self._loads[node.incarnation] = load
        model.computed(load.prompt_tokens - before.prompt_tokens, load.prompt_busy_s - before.prompt_busy_s)
        if role == "decode" and load.generated_tokens > before.generated_tokens:
            model.stepped(node.incarnation, load.running, load.step_s)
        self._update_fleet(role, node.incarnation)

    def answered(self, tokens: int) -> None:
        """Learn the length of a complete answer."""
        self.models["decode"].answered(tokens)

    def keep(self, incarnations: set[str]) -> None:
        """Forget all other nodes."""
        for gone in self._loads.keys() - incarnations:
            del self._loads[gone]
            for model in self.models.values():
                model.drop(gone)

    def _update_fleet(self, role: Role, incarnation: str) -> None:
        """Copy a node's learned factors into the fleet."""
        self._fleets.by_role[role].set_slowness(incarnation, *self.models[role].factors(incarnation))

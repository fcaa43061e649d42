"""Which fleet a node belongs to: that of its model and role. Runs on the router's event loop."""

from __future__ import annotations

from common.control.messages import Role
from router.nodes.node import Node
from router.policy import Fleet


class ModelFleets:
    """The usable nodes of one model as the policies see them. Invariant: a node is in at most one fleet."""

    def __init__(self) -> None:
        self.by_role: dict[Role, Fleet] = {"prefill": Fleet("prefill"), "decode": Fleet("decode")}
        """The nodes of pooling models have the role prefill."""
        self.finishing = Fleet("decode")
        """Decode nodes that drain and still work: a stream whose node is lost continues here if no other is left."""

    def decode(self, *, begun: bool) -> Fleet:
        """The decode nodes for a request; those that drain if it has `begun` and no other is left."""
        usable = self.by_role["decode"]
        return self.finishing if begun and not usable.incarnations else usable

    def sync(self, node: Node) -> None:
        """Update the node's row, and `Node.fleet`. It has a row while it is usable, or a draining decode node that works."""
        fleet, other = self.by_role[node.record.role], self.finishing
        finishes = node.works and node.load.draining and node.record.role == "decode"
        if finishes:
            fleet, other = other, fleet
        other.drop(node.incarnation)
        if not node.usable and not finishes:
            fleet.drop(node.incarnation)
            node.fleet = None
            return
        node.fleet = fleet
        if node.incarnation not in fleet:
            record = node.record
            fleet.add(
                node.node_id,
                node.incarnation,
                kv_kind=node.kv_kind,
                context=record.model.max_model_len,
                adapters=record.adapters,
                capacity=record.max_num_seqs,
                token_bytes=record.layout.spec.bytes_per_token,
            )
        legs = node.unreported
        fleet.reported(
            node.incarnation,
            node.load,
            in_flight=len(legs),
            in_flight_tokens=sum([leg.tokens for leg in legs]),
            in_flight_blocks=sum([leg.blocks for leg in legs]),
        )

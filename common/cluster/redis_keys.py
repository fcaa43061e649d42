"""Names of all keys in Redis; docs/redis.md describes their values. Pure.

The cluster's name is in braces, so that Redis Cluster keeps all keys of a cluster in one hash slot, and a script may use
several of them.
"""

from __future__ import annotations


class Keys:
    """The keys of one cluster."""

    def __init__(self, cluster: str) -> None:
        self.prefix = f"kvrelay:{{{cluster}}}:"
        """Prefix of every key."""
        self.nodes = self.prefix + "nodes"
        """Sorted set: node ids by time of their last renewal."""
        self.epoch = self.prefix + "epoch"
        """String: a random value; another value means that Redis lost its data."""
        self.desired = self.prefix + "desired"
        """String: how many nodes of each role the cluster wants, if something keeps its shape."""
        self.planner = self.prefix + "planner"
        """Hash: the router that plans the cluster's shape, and its last plan."""
        self.flip = self.prefix + "flip"
        """String: the transaction that changes roles of nodes at this moment."""

    def node(self, node_id: str) -> str:
        """String: the node's record."""
        return f"{self.prefix}node:{node_id}"

    def newest(self, node_id: str) -> str:
        """String: the node's record in its newest protocol version, if it says more than the one that older versions read."""
        return f"{self.prefix}newest:{node_id}"

    def fence(self, node_id: str) -> str:
        """Hash: the incarnation that may write for this node id."""
        return f"{self.prefix}fence:{node_id}"

    def adapters(self, node_id: str) -> str:
        """String: the LoRA adapters that an operator loaded into the running node."""
        return f"{self.prefix}adapters:{node_id}"

    def role(self, node_id: str) -> str:
        """String: the node's role, if it is not that of the command that starts it."""
        return f"{self.prefix}role:{node_id}"

    def load(self, node_id: str) -> str:
        """Hash: the node's load."""
        return f"{self.prefix}load:{node_id}"

    def blocks(self, incarnation: str) -> str:
        """Set: hashes of the blocks that the incarnation owns."""
        return f"{self.prefix}blocks:{incarnation}"

    def responses(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's stored responses by time."""
        return f"{self.prefix}responses:{tenant}"

    def response(self, name: str) -> str:
        """String: a stored response. `name`: `<tenant>:<response id>`."""
        return f"{self.prefix}response:{name}"

    def events(self, incarnation: str) -> str:
        """Stream: blocks that the incarnation stored and removed."""
        return f"{self.prefix}events:{incarnation}"

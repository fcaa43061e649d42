"""Decides which node of a machine changes its role, so that there are as many of each role as wanted. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from common.cluster.desired_state import SCALED_ROLES, TOTAL, Counts


class Trades:
    """The present and the wanted roles of a machine's nodes."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        """roles: by node id, at the start."""
        self.roles = dict(roles)
        self.wanted = self.counts()
        self._changed_s: dict[str, float] = {}

    def counts(self) -> Counts:
        """The present numbers, with their sum, which stays."""
        of_each = Counter(self.roles.values())
        return {**{role: of_each[role] for role in SCALED_ROLES}, TOTAL: len(self.roles)}

    def observe(self, roles: Mapping[str, str], now_s: float) -> None:
        """Enter what the nodes are now."""
        self._changed_s |= {name: now_s for name, role in roles.items() if self.roles[name] != role}
        self.roles |= roles

    def next(self) -> str | None:
        """The node to change now: of the role that has more than are wanted, the one that has changed least recently."""
        now = self.counts()
        surplus = next((role for role in SCALED_ROLES if now[role] > self.wanted[role]), None)
        of_role = sorted(name for name, role in self.roles.items() if role == surplus)
        return min(of_role, key=lambda name: self._changed_s.get(name, -math.inf), default=None)

"""Decides which resources a service reserves in a Ray cluster, and says what is missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.base.errors import ConfigError
from common.base.sentences import counted

Resources = dict[str, float]
"""Amounts by Ray's names: CPU, GPU."""


@dataclass(frozen=True)
class RayHost:
    """A host of the Ray cluster that is alive."""

    node_id: str
    address: str
    total: Resources


@dataclass(frozen=True)
class Placement:
    """A placement group: one bundle for each host of the service."""

    bundles: tuple[Resources, ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]

    @property
    def hosts(self) -> int:
        return len(self.bundles)


def place(name: str, ranks: int, of_rank: Resources, hosts: Sequence[RayHost]) -> Placement:
    """All ranks on one host if any could hold them, else equal shares on as few hosts as possible. What others use now does not
    count: it may become free.

    Raises: ConfigError that names what is missing.
    """
    for count in range(1, ranks + 1):
        share = {what: amount * ranks / count for what, amount in of_rank.items()}
        if ranks % count == 0 and sum(_holds(host.total, share) for host in hosts) >= count:
            return Placement((share,) * count, "STRICT_PACK" if count == 1 else "STRICT_SPREAD")
    raise ConfigError(
        f"{name} needs {_shown(of_rank)} for each of its {counted(ranks, 'rank')}, on one host or in equal shares on several; "
        f"the Ray cluster has {_listed(hosts)}"
    )


def why_pending(name: str, placement: Placement, hosts: Sequence[RayHost], free: dict[str, Resources]) -> str:
    """A sentence about a placement group that is not placed: what it needs, what is free by node id."""
    on = "one host" if placement.hosts == 1 else f"each of {placement.hosts} hosts"
    left = "; ".join(f"{host.address} {_shown(free.get(host.node_id, {}))}" for host in hosts) or "no host is alive"
    return f"{name} needs {_shown(placement.bundles[0])} on {on}; free: {left}"


def _holds(total: Resources, share: Resources) -> bool:
    return all(total.get(what, 0.0) >= amount for what, amount in share.items())


def _shown(resources: Resources) -> str:
    amounts = [
        f"{resources.get(what, 0.0):g} {what}" for what in ("CPU", "GPU") if resources.get(what) or what == "CPU"
    ]
    return " and ".join(amounts)


def _listed(hosts: Sequence[RayHost]) -> str:
    return "; ".join(f"{host.address} with {_shown(host.total)}" for host in hosts) or "no host that is alive"

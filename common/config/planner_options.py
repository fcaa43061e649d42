"""The options of the planner, which says how many prefill and decode nodes a cluster needs. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config.fields import option

PlannerMode = Literal["off", "advise", "apply", "publish"]


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How a router plans the numbers of nodes (docs/planner.md)."""

    planner: PlannerMode = option(
        "off",
        "Plan how many prefill and decode nodes the load needs: advise shows it (`kvrelay admin plan`), apply also changes the "
        "numbers that `kvrelay up` keeps: on one machine nodes trade roles, with --on ray they come and go. publish makes "
        "them metrics, by which an autoscaler such as that of Kubernetes scales. One of the cluster's routers plans.",
        "Planner",
    )
    planner_max_nodes: int | None = option(
        None,
        "Maximum number of nodes of both roles together that the planner may want; by default it changes only the split of "
        "those there are, as always on one machine.",
        "Planner",
        low=2,
    )

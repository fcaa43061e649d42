"""What `kvrelay up --on ray` asks of Ray: hosts, actors and placement groups by name. All calls block; any thread.

Actors and groups are detached, so that they outlive the process that made them, and are found again by their names in the
namespace `kvrelay`: `CLUSTER/SERVICE` and, for a host of a node beyond its first, `CLUSTER/SERVICE.NUMBER`.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

from common.base.endpoints import tcp_place
from common.base.errors import ConfigError, Unavailable
from kvrelay.up.on_ray.actor import Report, ServiceActor
from kvrelay.up.on_ray.placement import Placement, RayHost, Resources
from kvrelay.up.on_ray.services import RayService

NAMESPACE = "kvrelay"
_ANSWER_S = 5.0


class RayCluster:
    """The Ray cluster, for the services of one kvrelay cluster."""

    def __init__(self, address: str, cluster: str) -> None:
        """Connect to the Ray cluster at `address`. Raises: ConfigError if Ray is not installed or does not answer."""
        try:
            self._ray: Any = importlib.import_module("ray")
            self._groups: Any = importlib.import_module("ray.util.placement_group")
            self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        except ImportError:
            raise ConfigError("--on ray needs Ray: pip install 'kvrelay[ray]'") from None
        self._prefix = f"{cluster}/"
        try:
            if place := tcp_place(f"tcp://{address}"):
                socket.create_connection(place, _ANSWER_S).close()  # Ray itself would try for minutes
            self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
        except Exception as error:  # Ray's errors share no class
            raise ConfigError(f"no Ray cluster answers at --address {address}: {str(error).splitlines()[0]}") from None
        self._actor_class: Any = self._ray.remote(ServiceActor)

    def hosts(self) -> list[RayHost]:
        """The hosts that are alive."""
        return [
            RayHost(each["NodeID"], each["NodeManagerAddress"], each["Resources"])
            for each in self._ray.nodes()
            if each["Alive"]
        ]

    def free(self) -> dict[str, Resources]:
        """What is not reserved on each host, by node id."""
        state: Any = importlib.import_module("ray._private.state")
        return state.available_resources_per_node()

    def names(self) -> list[str]:
        """Names of the actors of this cluster, dead ones that Ray starts again included."""
        listed = self._ray.util.list_named_actors()
        return [name.removeprefix(self._prefix) for name in listed if name.startswith(self._prefix)]

    def reserve(self, service: RayService, placement: Placement) -> Any:
        """The placement group of a service, made if there is none. It may be pending."""
        name = self._prefix + service.name
        try:
            return self._ray.util.get_placement_group(name)
        except ValueError:
            bundles = list(placement.bundles)
            return self._groups.placement_group(bundles, placement.strategy, name=name, lifetime="detached")

    def is_placed(self, group: Any, timeout_s: float) -> bool:
        """Whether the group has its resources, within this time."""
        return group.wait(timeout_s)

    def start(self, service: RayService, group: Any | None, hosts: int) -> None:
        """Start the actors of a service: in its placement group, a router on the host of this process."""
        for number in range(hosts):
            if group is None:
                own_host = self._ray.get_runtime_context().get_node_id()
                where = self._strategies.NodeAffinitySchedulingStrategy(own_host, soft=False)
                resources: Resources = {"CPU": 0.0}
            else:
                where = self._strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number, placement_group_capture_child_tasks=False
                )
                resources = group.bundle_specs[number]
            self._actor_class.options(
                name=self._prefix + actor_name(service.name, number),
                lifetime="detached",
                max_restarts=-1,
                num_cpus=resources.get("CPU", 0.0),
                num_gpus=resources.get("GPU", 0.0),
                scheduling_strategy=where,
                get_if_exists=True,
            ).remote(service, is_follower=number > 0, hosts=hosts)

    def reports(self, after_lines: dict[str, int]) -> dict[str, Report]:
        """Reports of the actors with these names that answer in time."""
        asked = {name: self._call(name, "report", after_lines.get(name, 0)) for name in after_lines}
        pending = {name: reference for name, reference in asked.items() if reference is not None}
        if not pending:
            return {}
        answered: list[Any] = self._ray.wait(list(pending.values()), num_returns=len(pending), timeout=_ANSWER_S)[0]
        reports: dict[str, Report] = {}
        for name, reference in pending.items():
            if reference in answered:
                try:
                    reports[name] = self._ray.get(reference)
                except self._ray.exceptions.RayError:  # it died meanwhile; Ray starts it again
                    continue
        return reports

    def service(self, name: str) -> RayService:
        """What an actor runs. Raises: Unavailable if it does not answer."""
        reference = self._call(name, "service")
        try:
            if reference is not None:
                return self._ray.get(reference, timeout=_ANSWER_S)
        except self._ray.exceptions.RayError:
            pass
        raise Unavailable(f"the actor of {name} does not answer")

    def join(self, service: str, number: int, leader: Report) -> None:
        """Tell an actor of a node on several hosts where the first one is."""
        self._call(actor_name(service, number), "join", number, leader.host, leader.master_port)

    def stop(self, name: str) -> None:
        """Let the process of an actor end."""
        self._call(name, "stop")

    def remove(self, names: list[str], service: str) -> None:
        """End the actors of a service, with their processes, and give its resources back."""
        for name in names:
            try:
                self._ray.kill(self._ray.get_actor(self._prefix + name), no_restart=True)
            except ValueError:
                continue
        try:
            self._groups.remove_placement_group(self._ray.util.get_placement_group(self._prefix + service))
        except ValueError:  # a router has none
            return

    def close(self) -> None:
        """Disconnect; what was started goes on."""
        self._ray.shutdown()

    def _call(self, name: str, method: str, *arguments: object) -> Any | None:
        """Call an actor's method without waiting. None if there is no such actor."""
        try:
            actor = self._ray.get_actor(self._prefix + name)
        except ValueError:
            return None
        return getattr(actor, method).remote(*arguments)


def actor_name(service: str, number: int) -> str:
    """Name of the actor on a service's host `number`."""
    return service if number == 0 else f"{service}.{number}"


def service_of(actor: str) -> str:
    """Name of the service that an actor is part of."""
    return actor.partition(".")[0]

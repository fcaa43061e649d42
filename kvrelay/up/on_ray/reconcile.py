"""Decides what to start and to stop so that a Ray cluster holds the wanted services. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.up.on_ray.actor import Report
from kvrelay.up.on_ray.ray_cluster import service_of
from kvrelay.up.on_ray.services import RayService


@dataclass
class Actions:
    """The services to start, to retire and to join now."""

    start: list[RayService] = field(default_factory=list[RayService])
    """They have no actors."""
    retire: list[str] = field(default_factory=list[str])
    """Services that are not wanted, with these options or at all; highest numbers first."""
    join: list[tuple[str, int, Report]] = field(default_factory=list[tuple[str, int, Report]])
    """(service, number of its host, report of its first host) of nodes on several hosts."""


def reconcile(
    wanted: Sequence[RayService], names: Collection[str], reports: Mapping[str, Report], busy: Collection[str]
) -> Actions:
    """names: actors that exist; reports: of those that answer; busy: services that are being started or stopped."""
    actions = Actions()
    by_name = {service.name: service for service in wanted}
    there = {service_of(name) for name in names}
    for service in wanted:
        report = reports.get(service.name)
        if service.name in busy:
            continue
        if service.name not in there:
            actions.start.append(service)
        elif report is not None and report.digest != service.digest:
            actions.retire.append(service.name)
        elif report is not None:
            numbers = sorted(int(name.partition(".")[2]) for name in names if name.startswith(f"{service.name}."))
            actions.join += [(service.name, number, report) for number in numbers]
    surplus = [name for name in there if name not in by_name and name not in busy]
    actions.retire += sorted(surplus, key=_number, reverse=True)
    return actions


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0

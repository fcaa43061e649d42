"""`kvrelay up --on ray`: makes a Ray cluster hold the services that are wanted, again and again, until it is stopped.

It may die at any time: what it started goes on, and the next `kvrelay up` with the same --cluster takes it over. How many
nodes are wanted is in Redis, where `kvrelay admin scale` changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from common.base import logs
from common.base.errors import ConfigError, DeadlineExceeded, KvRelayError
from common.base.process import ending_signals, start_ticks
from common.base.sentences import counted
from common.cluster.desired_state import Counts, read_desired, write_desired
from common.cluster.redis_client import UNREACHABLE, check_redis, connect, forget_connections
from common.cluster.redis_keys import Keys
from common.cluster.running_clusters import RunningCluster, announced, runtime_folder
from common.config.service_configs import UpConfig
from common.config.sources import ENV_PREFIX, Source
from kvrelay.admin.client import TOKEN_VARIABLE, AdminClient
from kvrelay.up.console import Console, failure_line
from kvrelay.up.health import HealthProbe
from kvrelay.up.models import find_models
from kvrelay.up.on_ray.actor import Report
from kvrelay.up.on_ray.placement import Placement, place, why_pending
from kvrelay.up.on_ray.ray_cluster import RayCluster, service_of
from kvrelay.up.on_ray.reconcile import reconcile
from kvrelay.up.on_ray.services import RayService, RayServices, check_options
from kvrelay.up.plan import STOP_ORDER
from kvrelay.up.restarts import exit_code
from kvrelay.up.routers import RouterPlace, router_places
from kvrelay.up.supervisor import ChildFailed

_EVERY_S = 0.5
_PLACE_S = 30.0
"""Time that a service may wait for resources before the start fails; later, time between two messages about it."""
_STOP_S = 15.0
_DRAIN_S = 600.0


async def up_on_ray(config: UpConfig, sources: Mapping[str, Source]) -> None:
    """Run a cluster on Ray until SIGINT or SIGTERM. Raises: ConfigError, ChildFailed, DeadlineExceeded if the start fails."""
    check_options(config, sources)
    assert config.redis_url is not None
    await check_redis(config.redis_url)
    models = await asyncio.to_thread(find_models, config, sources)
    if len(models) > 1:
        raise ConfigError("--on ray serves one model: start another `kvrelay up --on ray --cluster NAME` for each")
    console = Console(["decode-00"], form=config.log_format)
    logs.configure(config.log_level, config.log_format, console.log_line)
    ray = await asyncio.to_thread(RayCluster, config.address, config.cluster)
    try:
        found = await asyncio.to_thread(ray.names)
        places, token = await asyncio.to_thread(_take_over, ray, found, config)
        with_gpus = config.device != "cpu" and any(host.total.get("GPU") for host in ray.hosts())
        environ = {name: value for name, value in os.environ.items() if name.startswith(ENV_PREFIX)}
        services = RayServices(config, sources, models[0], places, token, environ, with_gpus=with_gpus)
        running = RunningCluster(
            os.getpid(), {each.url: each.admin_url for each in places}, token, start_ticks(os.getpid())
        )
        with announced(running, runtime_folder(os.environ)):
            await Reconciler(config, services, places, token, ray, console).run()
    finally:
        ray.close()


def _take_over(ray: RayCluster, found: Sequence[str], config: UpConfig) -> tuple[list[RouterPlace], str]:
    """Places of the routers and the admin token: those of the routers that run, if an earlier `kvrelay up` left them."""
    routers = [name for name in found if name.startswith("router")]
    if not routers:
        return router_places(config), config.admin_token or secrets.token_urlsafe(24)
    kept = {name: ray.service(name) for name in sorted(routers)}
    token = next(iter(kept.values())).environ[TOKEN_VARIABLE]
    return [service.place for service in kept.values() if service.place is not None], token


class Reconciler:
    """Compares what is wanted with what is there, twice a second."""

    def __init__(
        self,
        config: UpConfig,
        services: RayServices,
        places: Sequence[RouterPlace],
        token: str,
        ray: RayCluster,
        console: Console,
    ) -> None:
        self._config, self._services, self._places, self._token = config, services, places, token
        self._ray, self._console = ray, console
        assert config.redis_url is not None
        self._redis, self._keys = connect(config.redis_url), Keys(config.cluster)
        self._counts: Counts = {"prefill": config.prefill, "decode": config.decode}
        self._reports: dict[str, Report] = {}
        self._next_lines: dict[str, int] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        """Services that are being started or stopped."""
        self._stop = asyncio.Event()
        self._failure: KvRelayError | None = None
        self._ready = False
        self._takes_over = False
        """An earlier `kvrelay up` has left the cluster: what fails now does not end it."""
        self._probe = HealthProbe()

    async def run(self) -> None:
        """Run until a signal or a failure of the start. Raises: the failure."""
        for signum in ending_signals():
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        kept = await read_desired(self._redis, self._keys)
        if kept is not None:
            self._takes_over = True
            self._counts = {**self._counts, **kept}
            self._console.say(f"goes on with the shape in Redis: {_shown(self._counts)}")
        await write_desired(self._redis, self._keys, self._counts)
        started_s = time.monotonic()
        try:
            while not self._stop.is_set():
                try:
                    await self._look()
                except Exception as error:  # Ray's errors share no class; what runs must not end with this look at it
                    if self._is_first_start:
                        raise
                    self._console.say(f"cannot ask Ray now: {error}")
                if not self._ready:
                    await self._check_start(started_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _EVERY_S)
        finally:
            await self._end()
        if self._failure is not None:
            raise self._failure

    @property
    def _is_first_start(self) -> bool:
        """What fails now is a mistake of the operator, which restarts would only hide."""
        return not self._ready and not self._takes_over

    def _on_signal(self, signum: int) -> None:
        self._console.say(f"{signal.Signals(signum).name}: stopping")
        self._stop.set()

    def _fail(self, error: KvRelayError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    # ------------------------------------------------------------ watch

    async def _look(self) -> None:
        """One turn: read what is wanted, ask what is there, and begin what is to be done."""
        try:
            self._counts = await read_desired(self._redis, self._keys) or self._counts
        except UNREACHABLE:
            await forget_connections(self._redis)
        names = await asyncio.to_thread(self._ray.names)
        after = {name: self._next_lines.get(name, 0) for name in names}
        self._reports = await asyncio.to_thread(self._ray.reports, after)
        self._show(names)
        wanted = self._services.wanted(self._counts)
        actions = reconcile(wanted, names, self._reports, self._busy)
        for service in actions.start:
            self._begin(service.name, self._start(service))
        for name in actions.retire:
            self._begin(name, self._retire(name))
        for service, number, leader in actions.join:
            await asyncio.to_thread(self._ray.join, service, number, leader)

    def _show(self, names: Sequence[str]) -> None:
        for name, report in self._reports.items():
            # An actor that was started again counts its lines from zero.
            is_new = report.next_line < self._next_lines.get(name, 0)
            self._next_lines[name] = 0 if is_new else report.next_line
            for line in [] if is_new else report.lines:
                self._console.child_line(name, line)
            if self._is_first_start and report.exit_code is not None and not report.has_started:
                last = report.lines[-1] if report.lines else ""
                self._fail(ChildFailed(failure_line(name, report.exit_code, last), exit_code(report.exit_code)))
        self._next_lines = {name: line for name, line in self._next_lines.items() if name in names}

    async def _check_start(self, started_s: float) -> None:
        sees = [await self._probe.sees(place.url, self._counts) for place in self._places]
        if all(sees) and not self._busy:
            self._ready = True
            urls = ", ".join(place.url for place in self._places)
            self._console.say(f"ready at {urls} (after {time.monotonic() - started_s:.1f} s): {_shown(self._counts)}")
            for name, report in sorted(self._reports.items()):
                self._console.say(f"  {name} on {report.host}, pid {report.pid}")
        elif self._is_first_start and time.monotonic() > started_s + self._config.start_timeout_s:
            waiting = ", ".join(self._busy) or "the routers to see all nodes"
            self._fail(
                DeadlineExceeded(f"not ready within {self._config.start_timeout_s:g} s, still waiting for {waiting}")
            )

    # ------------------------------------------------------------ start and stop services

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._busy[name] = task
        task.add_done_callback(lambda _: self._busy.pop(name, None))

    async def _start(self, service: RayService) -> None:
        try:
            if service.place is not None:
                await asyncio.to_thread(self._ray.start, service, None, 1)
                return
            group, placement = await self._reserve(service)
            await asyncio.to_thread(self._ray.start, service, group, placement.hosts)
        except KvRelayError as error:
            self._fail(error)

    async def _reserve(self, service: RayService) -> tuple[object, Placement]:
        """Wait until the service has its resources. Raises: ConfigError if it has none in time, while the cluster starts."""
        said_s = time.monotonic()
        while True:
            hosts = await asyncio.to_thread(self._ray.hosts)
            try:
                placement = place(service.name, service.ranks, service.of_rank, hosts)
                group = await asyncio.to_thread(self._ray.reserve, service, placement)
                if await asyncio.to_thread(self._ray.is_placed, group, 1.0):
                    return group, placement
                problem = why_pending(service.name, placement, hosts, await asyncio.to_thread(self._ray.free))
            except ConfigError as error:
                problem = error.message
                await asyncio.sleep(1.0)
            if time.monotonic() > said_s + _PLACE_S:
                said_s = time.monotonic()
                if self._is_first_start:
                    raise ConfigError(f"not placed within {_PLACE_S:g} s: {problem}")
                self._console.say(problem)

    async def _retire(self, name: str) -> None:
        """Drain a node, then end it."""
        self._console.say(f"{name} finishes its requests and ends")
        if not name.startswith("router"):
            try:
                await asyncio.to_thread(self._drain, name)
            except KvRelayError as error:  # its requests go on elsewhere
                self._console.say(f"{name} is ended undrained: {error.message}")
        await self._end_service(name)

    def _drain(self, name: str) -> None:
        client = AdminClient(self._places[0].admin_url, self._token, budget_s=_DRAIN_S)
        base = client.address_of(client.node(name))
        until_s = time.monotonic() + _DRAIN_S
        status = client.post("/drain", {}, base=base)
        while not status["idle"] and time.monotonic() < until_s and not self._stop.is_set():
            time.sleep(0.25)
            status = client.get("/status", base=base, timeout_s=10.0)

    async def _end_service(self, service: str) -> None:
        names = [name for name in await asyncio.to_thread(self._ray.names) if service_of(name) == service]
        for name in names:
            await asyncio.to_thread(self._ray.stop, name)
        until_s = time.monotonic() + _STOP_S
        while time.monotonic() < until_s:
            reports = await asyncio.to_thread(self._ray.reports, dict.fromkeys(names, 1 << 60))
            if all(report.pid is None for report in reports.values()):
                break
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self._ray.remove, names, service)

    async def _end(self) -> None:
        """Stop everything, clients before the services that they use, and forget the shape."""
        for task in list(self._busy.values()):
            task.cancel()
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        there = {service_of(name) for name in await asyncio.to_thread(self._ray.names)}
        there |= {service.name for service in self._services.wanted(self._counts)}  # groups that have no actor yet
        for role in STOP_ORDER:
            of_role = sorted(name for name in there if name.rpartition("-")[0] == role or name == role)
            await asyncio.gather(*map(self._end_service, of_role))
        try:
            await self._redis.delete(self._keys.desired)
        except UNREACHABLE:
            self._console.say("Redis is away: the next `kvrelay up` of this cluster finds the shape of this one there")
        await self._redis.aclose()
        await self._probe.close()
        self._console.say("everything stopped")


def _shown(counts: Counts) -> str:
    return " and ".join(counted(count, f"{role} node") for role, count in counts.items())

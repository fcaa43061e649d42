"""The supervisor of `kvrelay up`: starts the children, watches them, stops them in order.

One asyncio loop in the main thread. What to run and when to restart is decided by `plan` and `restarts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from common.base import logs
from common.base.endpoints import free_port
from common.base.errors import DeadlineExceeded, KvRelayError
from common.base.free_memory import free_memory_bytes
from common.base.process import SAME_SIGNAL_S, ending_signals, start_ticks
from common.cluster.redis_client import check_redis
from common.cluster.redis_server import redis_command
from common.cluster.running_clusters import RunningCluster, announced, runtime_folder
from common.config.service_configs import UpConfig
from common.config.sources import Source
from common.control.messages import Task
from common.security.tls import Credentials
from kvrelay.admin.client import AdminClient, AdminUnreachable
from kvrelay.up.certificates import refuse_given, with_certificates
from kvrelay.up.child import Child
from kvrelay.up.child_health import ChildHealth
from kvrelay.up.console import Console, banner, failure_line
from kvrelay.up.fork_client import ForkServer, watch_orphans
from kvrelay.up.gpus import VISIBLE, find_gpus
from kvrelay.up.hang_watch import HangWatch
from kvrelay.up.models import find_models
from kvrelay.up.pid_file import PidEntry, PidFile
from kvrelay.up.plan import STOP_ORDER, ChildSpec, check_memory, first_start_s, plan_children
from kvrelay.up.restarts import describe_exit, exit_code
from kvrelay.up.role_keeper import RoleKeeper
from kvrelay.up.routers import router_places
from kvrelay.up.run_folder import run_folder, with_config_copy
from kvrelay.up.trials import trials

_PROBE_S = 0.1
_PROGRESS_S = 5.0
_STOP_S = 10.0
"""Time between SIGTERM and SIGKILL for a child."""


class ChildFailed(KvRelayError):
    """A child ended before it was ever ready; the supervisor exits with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def up(
    config: UpConfig, sources: Mapping[str, Source], fork_servers: Mapping[str, ForkServer] | None = None
) -> None:
    """Run a cluster until SIGINT, SIGTERM or (except under `nohup`) SIGHUP. No child is ever left behind.

    `fork_servers`: by the role of what they fork; None: all are started as programs.

    Raises: ConfigError before anything is started; ChildFailed or DeadlineExceeded if the start fails.
    """
    routers = router_places(config)
    pid_file = PidFile(config.pid_file)
    if config.redis_url is not None:
        await check_redis(config.redis_url)
    admin_token = config.admin_token or secrets.token_urlsafe(24)
    pid = os.getpid()
    running = RunningCluster(pid, {place.url: place.admin_url for place in routers}, admin_token, start_ticks(pid))
    with run_folder() as folder:
        redis_port = free_port()
        redis_url = config.redis_url or f"redis://127.0.0.1:{redis_port}/0"
        gpus = find_gpus(os.environ)
        models = await asyncio.to_thread(find_models, config, sources)
        specs = plan_children(
            config,
            sources,
            models,
            redis_url=redis_url,
            routers=routers,
            own_redis=None if config.redis_url else tuple(redis_command(redis_port, str(folder))),
            host_name=socket.gethostname(),
            admin_token=admin_token,
            gpus=gpus,
        )
        check_memory(specs, os.environ, free_memory_bytes(), gpus=bool(gpus))
        specs = with_config_copy(specs, str(folder))
        credentials = None
        if config.tls:
            specs, credentials = with_certificates(specs, folder)
        else:
            refuse_given(specs, os.environ)
        with announced(running, runtime_folder(os.environ)):
            await Supervisor(config, specs, redis_url, pid_file, credentials, fork_servers, running).run()


class Supervisor:
    """The children and the tasks that watch them.

    Only a child's own `_supervise` task starts it and waits for it; to stop it, signal it and wait for that task.
    """

    def __init__(
        self,
        config: UpConfig,
        specs: list[ChildSpec],
        redis_url: str,
        pid_file: PidFile,
        credentials: Credentials | None = None,
        fork_servers: Mapping[str, ForkServer] | None = None,
        running: RunningCluster | None = None,
    ) -> None:
        self._running = running
        self._config = config
        self._console = Console([spec.name for spec in specs], form=config.log_format)
        self._children = [Child(spec, self._console, (fork_servers or {}).get(spec.role)) for spec in specs]
        self._first_start_s = first_start_s(config, on_gpus=any(VISIBLE in spec.environ for spec in specs))
        self._pid_file = pid_file
        self._routers = [spec for spec in specs if spec.role == "router"]
        self._waiting_routers: list[str] = []
        """Routers that at the last probe did not see all nodes or could not serve their model yet."""
        self._health = ChildHealth(redis_url, config.cluster, credentials)
        self._child_started = asyncio.Event()
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._starts: list[asyncio.Task[None]] = []
        """Starts whose child has no process yet: the fork server may import for a minute before it forks the first one."""
        self._stop = asyncio.Event()
        self._kill_now = asyncio.Event()
        """A second Ctrl-C: kill instead of waiting."""
        self._signalled_s = 0.0
        self._failure: BaseException | None = None
        self._published = False

    async def run(self) -> None:
        """Run until a signal or a failure. Raises: the failure."""
        logs.configure(self._config.log_level, self._config.log_format, self._console.log_line)
        loop = asyncio.get_running_loop()
        for signum in ending_signals():
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            hangs = HangWatch(self._children, self._console, self._health.answers)
            for watcher in (
                self._start(),
                self._watch_readiness(),
                watch_orphans(lambda: [child.pid for child in self._children]),
                self._show_progress(),
                hangs.run(),
                self._keep_roles(),
            ):
                self._spawn_watcher(watcher)
            await self._stop.wait()
        finally:
            await self._shut_down()
        if self._failure is not None:
            raise self._failure
        self._console.say("everything stopped")

    def _on_signal(self, signum: int) -> None:
        if not self._stop.is_set():
            self._console.say(f"{signal.Signals(signum).name}: stopping")
            self._stop.set()
            self._signalled_s = time.monotonic()
        elif time.monotonic() > self._signalled_s + SAME_SIGNAL_S:
            self._kill_now.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _spawn_watcher(self, work: Coroutine[Any, Any, None]) -> None:
        self._watchers.append(asyncio.create_task(self._guard(work)))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # any error must stop the children; `run` raises it afterwards
            self._fail(error)

    # ------------------------------------------------------------ start

    async def _start(self) -> None:
        started_s = time.monotonic()
        self._console.say("starting " + ", ".join(child.spec.name for child in self._children))
        try:
            async with asyncio.timeout(self._first_start_s):
                for child in self._children:
                    self._supervisors[child.spec.name] = asyncio.create_task(self._guard(self._supervise(child)))
                    while child.spec.role == "redis" and not child.ready:
                        await asyncio.sleep(_PROBE_S / 4)
                while self._unready() or await self._find_waiting_routers():
                    await asyncio.sleep(_PROBE_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"not ready within {self._first_start_s:g} s, still waiting for {self._missing()}; "
                "--start-timeout-s allows more"
            ) from None
        await self._announce(time.monotonic() - started_s)

    def _unready(self) -> list[str]:
        return [child.spec.name for child in self._children if not child.ready]

    async def _find_waiting_routers(self) -> list[str]:
        roles = ("prefill", "decode", "pooling")
        nodes = {role: sum(child.spec.role == role for child in self._children) for role in roles}
        sees = self._health.probe.sees
        self._waiting_routers = [spec.name for spec in self._routers if not await sees(spec.url, nodes)]
        return self._waiting_routers

    def _missing(self) -> str:
        """The services that the start still waits for."""
        routers = "the router" if len(self._routers) == 1 else ", ".join(self._waiting_routers) or "the routers"
        return ", ".join(self._unready()) or f"{routers} to see all nodes and serve their models"

    async def _show_progress(self) -> None:
        started_s = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if self._published:
                return
            elapsed_s = time.monotonic() - started_s
            self._console.say(f"waiting for {self._missing()} ({elapsed_s:.0f} of {self._first_start_s:.0f} s)")

    async def _announce(self, took_s: float) -> None:
        self._published = True
        self._write_pids()
        rows = [(child.spec.name, child.pid or 0, child.address) for child in self._children]
        records = self._health.records.values()
        models: dict[str, Task] = {record.model.name: record.model.task for record in records}
        urls = [spec.url for spec in self._routers]
        kernels = sorted({record.kernels for record in records})
        needs_key = bool(self._config.api_key or self._config.api_key_file)
        tried = await asyncio.to_thread(trials, models, self._explain)
        text = banner(urls, models, tried, rows, kernels, needs_key, took_s)
        self._console.announce(text, f"ready at {', '.join(urls)} (after {took_s:.1f} s)")

    def _explain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """How the first router would place a prompt. Raises: KvRelayError if it refuses it. What it does not answer is unknown."""
        running = self._running
        with contextlib.suppress(AdminUnreachable):
            if running is not None:
                return AdminClient(next(iter(running.routers.values())), running.token).post("/route", body)
        return {"mode": "unknown"}

    # ------------------------------------------------------------ watch

    async def _supervise(self, child: Child) -> None:
        """Start the child, and again whenever it dies, until everything stops."""
        name = child.spec.name
        while not self._stop.is_set():
            return_code = await self._run_child(child)
            if self._stop.is_set():
                return
            child.show_hidden_lines()
            delay_s = child.policy.died(time.monotonic())
            if delay_s is None:
                raise ChildFailed(failure_line(name, return_code, child.last_line), exit_code(return_code))
            self._write_pids()
            when = f"in {delay_s:g} s" if delay_s else "now"
            self._console.say(f"{name} ended ({describe_exit(return_code)}); restarting it {when}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)

    async def _run_child(self, child: Child) -> int:
        """Start the child and wait for its end. Returns its return code; 1 if a restart could not create a process, or
        everything stopped before there was one.

        Raises: OSError if its first start fails.
        """
        start = asyncio.create_task(child.start())
        self._starts.append(start)
        try:
            await start
        except asyncio.CancelledError:
            return 1
        except OSError as error:
            if not child.policy.was_ever_ready:
                raise
            self._console.say(f"{child.spec.name} cannot be started now: {error}")
            return 1
        finally:
            self._starts.remove(start)
        self._child_started.set()
        self._write_pids()
        if self._stop.is_set():
            child.signal(signal.SIGTERM)
        return await child.wait()

    async def _watch_readiness(self) -> None:
        """Probe the children that are not ready; sleep while all are."""
        while True:
            self._child_started.clear()
            if not self._unready():
                await self._child_started.wait()
            if any(child.spec.node_id and child.pid is not None and not child.ready for child in self._children):
                await self._health.find_nodes()
            for child in self._children:
                if child.pid is not None and not child.ready:
                    await self._look_at(child)
            await asyncio.sleep(_PROBE_S)

    async def _look_at(self, child: Child) -> None:
        """Probe a child and note that it is ready, unless it ended meanwhile."""
        pid = child.pid
        if not await self._health.is_usable(child):
            self._end_if_overdue(child)
        elif child.pid == pid:
            child.ready = True
            child.policy.ready(time.monotonic())
            if self._published:
                self._console.say(f"{child.spec.name} is ready again (pid {pid})")
            self._write_pids()

    def _end_if_overdue(self, child: Child) -> None:
        """Kill a restarted child that is not ready in time. The first start has its own deadline."""
        allowed_s = self._config.start_timeout_s
        if self._published and child.pid is not None and time.monotonic() > child.started_s + allowed_s:
            self._console.say(f"{child.spec.name} is not ready after {allowed_s:g} s (pid {child.pid}): killing it")
            child.signal(signal.SIGKILL)

    async def _keep_roles(self) -> None:
        """Keep the wanted numbers of each role, where nodes can trade roles. Not with a shared Redis, whose numbers would be those of
        several machines."""
        while not self._published:
            await asyncio.sleep(_PROBE_S)
        nodes = [child for child in self._children if child.spec.node_id]
        models = {record.model.name for record in self._health.records.values()}
        running = None if self._config.redis_url else self._running
        if running is not None and len(models) == 1 and {child.role for child in nodes} == {"prefill", "decode"}:
            await RoleKeeper(self._config, nodes, self._health, self._console, running, self._write_pids).run()

    def _write_pids(self) -> None:
        if not self._published or self._stop.is_set():
            return
        running = [child for child in self._children if child.pid is not None]
        entries = [PidEntry(c.spec.name, c.role, c.pid or 0, c.address if c.ready else "") for c in running]
        try:
            self._pid_file.write(entries)
        except OSError as error:
            self._console.say(f"cannot write the pid file: {error}")

    # ------------------------------------------------------------ stop

    async def _shut_down(self) -> None:
        self._stop.set()
        await _cancel([*self._watchers, *self._starts])
        for role in STOP_ORDER:
            await self._stop_children([child for child in self._children if child.role == role])
        self._pid_file.remove()
        await self._health.close()

    async def _stop_children(self, children: list[Child]) -> None:
        tasks = [self._supervisors[c.spec.name] for c in children if c.spec.name in self._supervisors]
        if not tasks:
            return
        for child in children:
            child.signal(signal.SIGTERM)
        kill_now = asyncio.create_task(self._kill_now.wait())
        done = asyncio.gather(*tasks)
        await asyncio.wait([done, kill_now], timeout=_STOP_S, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            late = ", ".join(child.spec.name for child in children if child.pid is not None)
            self._console.say(f"killing {late}")
            for child in children:
                child.signal(signal.SIGKILL)
        await done
        await _cancel([kill_now])


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until all have ended: a library may swallow one cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=1.0)

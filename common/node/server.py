"""The server around a node's core: control socket, links to peers, leases of routers, registration.

Everything here runs on the process's asyncio loop; the core runs on the engine's thread. `EngineLoop.post` passes events to
the core, `SendBuffer` passes its messages back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from common.base.clock import monotonic, until_next
from common.base.endpoints import is_loopback, tcp_place
from common.base.errors import EngineError, ProtocolError, RankLost, RestartRequested, Unavailable
from common.cluster.address import HostAddresses
from common.cluster.kv_event_publisher import KvEventPublisher
from common.cluster.membership import Registrar
from common.cluster.records import LoadedAdapters
from common.cluster.redis_client import check_redis
from common.config.service_configs import NodeConfig
from common.control.admin_server import AdminRoute, AdminServer
from common.control.frames import SILENCE_S
from common.control.links import Identity, Link, Server
from common.control.messages import (
    AttemptFailed,
    Message,
    NodeLoad,
    NodeRecord,
    PeerRef,
    Ping,
    Pong,
    Role,
    TokenBatch,
    TransferAbort,
)
from common.engine.loop import EngineCore, EngineLoop
from common.kv.journal import BlockJournal
from common.node.adapter_table import AdapterSource
from common.node.drain import Drain
from common.node.events import ClientLost, FromClient, FromPeer, OutgoingMessage, PeerGone, SendBuffer, ToClient
from common.security.expiry import warn_before_end
from common.security.tls import open_credentials

log = logging.getLogger(__name__)

_MAX_NAME_CHARS = 64
_FEW_CHUNKS = 8
"""Maximum number of chunks that the engine's thread packs and sends itself; each takes some microseconds."""


class ServedCore(EngineCore, Protocol):
    """The part of a node's core that the server uses, in addition to what the engine loop uses."""

    @property
    def load(self) -> NodeLoad: ...

    def describe_attempts(self) -> list[dict[str, Any]]: ...


class NodeServer:
    """One node's sockets and leases. First `bind`, then build the core with `send_buffer` and `me`, then `run` it."""

    def __init__(self, config: NodeConfig, former: NodeServer | None = None) -> None:
        """`former`: the server of the node's role before, whose id and port this one keeps. Otherwise a node without a configured
        id gets one that no other node has."""
        self.config = config
        self._tls = open_credentials(config.tls_dir)
        self._port, node_id = config.port, config.node_id
        if former is not None:
            self._port, node_id = former.port, former.node_id
        node_id = node_id or f"{config.section}-{platform.node()}-{secrets.token_hex(3)}"
        self.me = PeerRef(node_id, incarnation=secrets.token_hex(8), control_address="", data_addresses=[])
        self.send_buffer = SendBuffer(self._deliver_from_engine)
        self._handed_over = self._delivered = 0
        """Number of message lists that the engine's thread has passed to the loop, and number of those that the loop has sent."""
        self._loop = asyncio.get_running_loop()
        self._engine: EngineLoop | None = None
        self._core: ServedCore | None = None
        self._leases: dict[Identity, float] = {}
        self._holders: dict[Identity, str] = {}
        """Names that the lease holders give themselves."""
        self._links: dict[str, Link] = {}
        self.drain = Drain(config.lease_s)
        self._admin: AdminServer | None = None
        self._admin_address = ""
        self._registrar: Registrar | None = None
        self._crashed = asyncio.Event()
        self._crash: BaseException | None = None
        self._end = asyncio.Event()
        self._restarts = False
        self._next_role: Role | None = None

    @property
    def port(self) -> int:
        """The port of the control socket, after `bind`."""
        place = tcp_place(self._server.address)
        assert place is not None
        return place[1]

    @property
    def node_id(self) -> str:
        """The node's id. It stays the same over restarts if it is configured."""
        return self.me.node_id

    async def bind(self) -> None:
        """Bind the control port and check that Redis answers, before the slow part of start-up. Raises: ConfigError."""
        config, addresses = self.config, HostAddresses.of(self.config)
        await check_redis(config.redis_url)
        self._server = Server(config.host, self._port, self._on_message, self._tls)
        self.me = replace(self.me, control_address=addresses.advertised(self._server.address))
        if config.admin_token:
            self._admin = AdminServer(config.admin_host, config.admin_port, config.admin_token, self._tls)
            url = self._admin.url
            self._admin_address = url if is_loopback(config.admin_host) else addresses.advertised(url)

    def post(self, event: Any) -> None:
        """Pass an event to the core. Any thread."""
        if self._engine is not None:
            self._engine.post(event)

    @property
    def leases(self) -> list[Identity]:
        """Holders of a lease at this node: routers and, at a decode node, prefill nodes."""
        return list(self._leases)

    def describe_leases(self) -> list[dict[str, Any]]:
        """Describe for operators the lease holders, when their leases end, and whether they know that this node drains."""
        now_s = monotonic()
        return [
            {
                "holder": self._holders.get(identity, "unknown: no ping received"),
                "ends_in_s": round(until_s - now_s, 2),
                "knows_of_drain": self.drain.knows(identity),
            }
            for identity, until_s in self._leases.items()
        ]

    @property
    def unregistered(self) -> str | None:
        """Why the latest renewal of the registration in Redis failed; None if it succeeded."""
        return "not asked yet" if self._registrar is None else self._registrar.unavailable

    @property
    def load(self) -> NodeLoad:
        """The present load; all zero before `run`."""
        if self._core is None or self._engine is None:
            return NodeLoad()
        load, age_s = self._core.load, monotonic() - self._engine.last_round_s
        return replace(load, step_age_s=max(age_s, load.step_age_s), draining=self.drain.active)

    def ask(self, question: Callable[[], Any]) -> Future[Any]:
        """Run `question` on the engine's thread, between two steps. Only while `run` runs."""
        assert self._engine is not None
        return self._engine.ask(question)

    def adapters_changed(self, sources: Sequence[AdapterSource], loaded: LoadedAdapters | None) -> None:
        """Register at once the LoRA adapters that the node now serves. `loaded`: those that were loaded while the node ran."""
        if self._registrar is not None:
            paths = {source.adapter.name: source.path for source in sources}
            self._registrar.update([source.adapter for source in sources], paths, loaded)

    def ask_attempts(self) -> Future[list[dict[str, Any]]]:
        """Ask the core for `describe_attempts` between two steps. Only while `run` runs."""
        assert self._core is not None
        return self.ask(self._core.describe_attempts)

    async def run(
        self,
        core: ServedCore,
        record: NodeRecord,
        journal: BlockJournal,
        on_ready: Callable[[], None],
        routes: list[AdminRoute],
        loaded: LoadedAdapters | None = None,
        own_role: Role | None = None,
        use_idle_time: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Serve until cancelled or `leave`, then shut down in order. `journal` belongs to the core's block pool; `routes` are those
        of the admin port; `loaded` and `own_role`: see `Registrar`. `use_idle_time` is passed to `EngineLoop`.

        Raises: EngineError if the engine loop crashed, ConfigError if another node took our id, RestartRequested after
        `restart`.
        """
        self._core = core
        self._engine = EngineLoop(core, self.send_buffer.flush, self.on_crash, use_idle_time=use_idle_time)
        self._engine.start()
        redis_url, cluster, lease_s = self.config.redis_url, self.config.cluster, self.config.lease_s
        registrar = self._registrar = Registrar(
            redis_url,
            cluster,
            replace(record, admin_address=self._admin_address, lease_s=lease_s),
            lease_s=lease_s,
            load=lambda: self.load,
            loaded=loaded,
            tls_dir=self.config.tls_dir,
            own_role=own_role,
        )
        publisher = KvEventPublisher(redis_url, cluster, record.peer, journal, lease_s=lease_s)
        if self._admin is not None:
            self._admin.start(routes)
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(registrar.run()),
            asyncio.create_task(publisher.run()),
            asyncio.create_task(self._housekeeping()),
            asyncio.create_task(self._crashed.wait()),
            asyncio.create_task(self._end.wait()),
        ]
        if self.config.tls_dir is not None:
            tasks.append(asyncio.create_task(warn_before_end(self.config.tls_dir)))
        try:
            on_ready()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(registrar, self._engine)
        if self._crash is not None:
            what = "a rank was lost" if isinstance(self._crash, RankLost) else "the engine loop crashed"
            raise EngineError(f"{what}: {self._crash}") from self._crash
        if self._restarts:
            raise RestartRequested("an operator asked for a restart")

    async def _close(self, registrar: Registrar, engine: EngineLoop) -> None:
        """End all parts; an error of one part does not prevent the others from ending."""
        async with contextlib.AsyncExitStack() as parts:  # the part that is pushed last ends first
            parts.push_async_callback(self._server.close)
            parts.callback(self._close_links)
            if self._crash is None:
                parts.push_async_callback(asyncio.to_thread, engine.stop)
            if self._admin is not None:
                parts.push_async_callback(self._admin.close)
            parts.push_async_callback(registrar.deregister, self._next_role)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    # ------------------------------------------------------------ in

    def _on_message(self, identity: Identity, message: Message) -> None:
        if isinstance(message, Ping):
            if message.lease_s > 0:
                self._leases[identity] = monotonic() + message.lease_s
                self._holders[identity] = message.router_id[:_MAX_NAME_CHARS]
                self.drain.pinged(identity)
            self._reply(identity, Pong(self.me.node_id, self.me.incarnation, self.load))
        elif self._engine is not None:
            # A cut link may deliver a message after its sender's lease has ended: every attempt must have a lease.
            self._leases.setdefault(identity, monotonic() + self.config.lease_s)
            self._engine.post(FromClient(identity, message))

    async def _housekeeping(self) -> None:
        """End the leases of silent routers and peers, and renew our own."""
        while True:
            await asyncio.sleep(until_next(self.config.lease_s / (3 if self.load.idle else 6), monotonic()))
            now_s = monotonic()
            for identity in [i for i, until_s in self._leases.items() if now_s > until_s]:
                holder = self._holders.get(identity, "a router or node")
                if self._server.is_connected(identity):
                    log.warning("%s was silent past its lease; its attempts are aborted", holder)
                else:  # the holder ended, or connects again under another identity
                    log.info("%s closed its connection, and its lease has ended", holder)
                self._client_lost(identity)
            for link in self._links.values():
                self._ping_peer(link)

    def _client_lost(self, identity: Identity) -> None:
        if self._leases.pop(identity, None) is not None:
            self.drain.lease_ended(identity)
        self._holders.pop(identity, None)
        self.post(ClientLost(identity))

    def on_crash(self, error: BaseException) -> None:
        """End the node: `run` raises the first such error. Any thread."""
        if self._crash is None:
            log.error("the node ends: %s", error)
            self._crash = error
        self._loop.call_soon_threadsafe(self._crashed.set)

    def restart(self, role: Role | None = None) -> None:
        """End the node in order: `run` raises RestartRequested. `role`: of the node's next process; None: as now."""
        self._restarts, self._next_role = True, role
        self._end.set()

    def leave(self) -> None:
        """End serving in order: `run` returns. Nothing may run any more."""
        self._end.set()

    # ------------------------------------------------------------ out

    def _deliver_from_engine(self, messages: list[OutgoingMessage]) -> None:
        """Send a step's messages, on the engine's thread. Few tokens are sent at once, if no earlier message still waits for the
        loop: to wake the loop would cost more, and take a core from the next step."""
        if len(messages) == 1 and self._handed_over == self._delivered and self._send_few_tokens(messages[0]):
            return
        self._handed_over += 1
        self._loop.call_soon_threadsafe(self._deliver_next, messages)

    def _send_few_tokens(self, outgoing: OutgoingMessage) -> bool:
        message = outgoing.message
        return (
            isinstance(outgoing, ToClient)
            and isinstance(message, TokenBatch)
            and len(message.chunks) <= _FEW_CHUNKS
            and self._server.send_directly(outgoing.identity, message)
        )

    def _deliver_next(self, messages: list[OutgoingMessage]) -> None:
        self._deliver(messages)
        self._delivered += 1

    def _deliver(self, messages: list[OutgoingMessage]) -> None:
        for outgoing in messages:
            try:
                if isinstance(outgoing, ToClient):
                    self._reply(outgoing.identity, outgoing.message)
                else:
                    self._send_to_peer(outgoing.peer, outgoing.message)
            except Exception:  # a bug in one message must not lose the other messages
                log.exception("could not send a %s", type(outgoing.message).__name__)

    def _reply(self, identity: Identity, message: Message) -> None:
        try:
            self._server.send(identity, message)
        except Unavailable:
            self._client_lost(identity)
        except ProtocolError as error:  # a bug; the receiver must not wait for the message until a deadline
            key = getattr(message, "key", None)
            if key is None or isinstance(message, AttemptFailed):
                raise
            log.error("%s: %s", key, error.message)
            self._reply(identity, AttemptFailed(key, error.code, error.message))

    def _send_to_peer(self, peer: PeerRef, message: Message) -> None:
        link = self._links.get(peer.incarnation)
        if link is None:
            try:
                link = Link(
                    peer.control_address,
                    on_message=lambda answer: self._on_peer_message(peer.incarnation, answer),
                    on_lost=lambda reason: self._link_lost(peer, reason),
                    connect_timeout_s=SILENCE_S,
                    credentials=self._tls,
                )
            except Unavailable as error:
                self.post(PeerGone(peer.incarnation, str(error)))
                return
            self._links[peer.incarnation] = link
            self._ping_peer(link)
        try:
            link.send(message)
        except (Unavailable, ProtocolError) as error:  # the latter: its version lacks what the message needs
            self._peer_gone(peer.incarnation, error.message)

    def _ping_peer(self, link: Link) -> None:
        """Renew our lease at that peer, which drops us when the lease ends."""
        with contextlib.suppress(Unavailable):  # the next message fails too, and is handled
            link.send(Ping(self.me.node_id, self.config.lease_s))

    def _on_peer_message(self, incarnation: str, message: Message) -> None:
        if not isinstance(message, Pong):
            self.post(FromPeer(incarnation, message))

    def _link_lost(self, peer: PeerRef, reason: str) -> None:
        """Fail the peer's attempts. Aborts that the full link refused are sent again, because their attempts have ended here."""
        refused = self._links[peer.incarnation].refused
        self._peer_gone(peer.incarnation, reason)
        for message in refused:
            if isinstance(message, TransferAbort):
                self._send_to_peer(peer, message)

    def _peer_gone(self, incarnation: str, reason: str) -> None:
        link = self._links.pop(incarnation, None)
        if link is not None:
            link.close()
        self.post(PeerGone(incarnation, reason))

"""Events and messages between a node's engine thread and its sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from common.control.item_count import SENT_ITEMS
from common.control.links import Identity
from common.control.messages import Message, PeerRef, TokenBatch, TokenChunk, items_of

# Events that the server posts to the engine loop. Transfer threads post those of `common.engine.kv_transfer`.


@dataclass(frozen=True)
class FromClient:
    """A message on the node's control socket: from a router, or from a prefill leader to a decode node."""

    identity: Identity
    message: Message

    @property
    def sender(self) -> str:
        """For logs."""
        return self.identity.decode()


@dataclass(frozen=True)
class FromPeer:
    """An answer on a link that this node opened to `incarnation`."""

    incarnation: str
    message: Message

    @property
    def sender(self) -> str:
        """For logs."""
        return self.incarnation


@dataclass(frozen=True)
class ClientLost:
    """The lease of a router, or of a prefill node that relays to this one, ended, or nothing can be sent to it."""

    identity: Identity


@dataclass(frozen=True)
class PeerGone:
    """The link to this incarnation is lost."""

    incarnation: str
    reason: str


@dataclass(frozen=True)
class ToClient:
    """Send on the control socket."""

    identity: Identity
    message: Message


@dataclass(frozen=True)
class ToPeer:
    """Send on the link to this peer, which is opened if there is none."""

    peer: PeerRef
    message: Message


OutgoingMessage = ToClient | ToPeer


class SendBuffer:
    """Collects the messages of one round of the engine loop; `flush` hands them over together.

    Token chunks for one router travel as one batch, at the end of the round or before its next message of another kind, so
    that each router gets its messages in order: the end of an answer must not arrive after a failure of its attempt.
    """

    def __init__(self, deliver: Callable[[list[OutgoingMessage]], None]) -> None:
        self._deliver = deliver
        self._messages: list[OutgoingMessage] = []
        self._chunks: dict[Identity, list[TokenChunk]] = {}

    def reply(self, identity: Identity, message: Message) -> None:
        for part in batches(self._chunks.pop(identity, [])):
            self._messages.append(ToClient(identity, TokenBatch(part)))
        self._messages.append(ToClient(identity, message))

    def to_peer(self, peer: PeerRef, message: Message) -> None:
        self._messages.append(ToPeer(peer, message))

    def tokens(self, identity: Identity, chunk: TokenChunk) -> None:
        self._chunks.setdefault(identity, []).append(chunk)

    def flush(self) -> None:
        if not (self._messages or self._chunks):
            return
        out = self._messages + [
            ToClient(identity, TokenBatch(part))
            for identity, chunks in self._chunks.items()
            for part in batches(chunks)
        ]
        self._messages, self._chunks = [], {}
        self._deliver(out)


_CHUNK_ITEMS, _MARK_ITEMS = 20, 4
"""MessagePack items of a chunk without its tokens, and of each mark of its timeline; estimates."""


def batches(chunks: list[TokenChunk]) -> Iterator[list[TokenChunk]]:
    """The chunks in order, in parts that fit into one message each (`SENT_ITEMS`)."""
    start = items = 0
    for index, chunk in enumerate(chunks):
        found = chunk.logprobs[0] if chunk.logprobs else None
        likely, whole_bytes = (None, 0) if found is None else (len(found.top_ids), len(found.whole))
        more = _CHUNK_ITEMS + items_of(len(chunk.token_ids), likely, whole_bytes)
        if chunk.stats is not None:
            more += _MARK_ITEMS * len(chunk.stats.timeline)
        if index > start and items + more > SENT_ITEMS:
            yield chunks[start:index]
            start, items = index, 0
        items += more
    if chunks:
        yield chunks[start:]


def brief(event: object) -> str:
    """An event's kind for logs: its content may be large."""
    if isinstance(event, FromClient | FromPeer):
        return f"{type(event.message).__name__} from {event.sender[:32]}"
    return type(event).__name__

"""The messages of every link, and their one codec. MessagePack only; nothing here can run code.

    router -> node      PrefillRequest, DecodeRequest, Abort, Ping
    node -> router      TokenBatch (of TokenChunk), AttemptFailed, Pong
    prefill -> decode   Offer, PrefillDone, TransferAbort            (leader to leader)
    decode -> prefill   Grant, TransferAbort, TransferReceived       (leader to leader)
    node -> Redis       NodeRecord

On the wire a message is `[PROTOCOL_VERSION, type name, body]`; a dataclass is a map by field name there, a named tuple
(what every request has many of) an array in the order of its fields. A frame of a control link is an array of messages.
`decode` checks version, type, field names and field types before anybody sees the object; the sockets bound a frame's
size before it is allocated. Every message about a request carries its `AttemptKey`, so that late messages of an
older attempt can be recognised and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import ConfigDict, TypeAdapter, ValidationError

from common.base.errors import KvRelayError, ProtocolError
from common.kv.layout import KVLayout

PROTOCOL_VERSION = 6
"""Of control messages, records and data headers alike; also raised when the order of a payload's bytes changes."""
MAX_MESSAGE_BYTES = 16 * 2**20
"""A control message above this ends its connection before it is read. A 1M-token prompt is 5 MB."""

_STRICT = ConfigDict(extra="forbid")


class AttemptKey(NamedTuple):
    """One try to serve one request. `request_id` is made by the router, `attempt` counts from 1."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class SamplingParams(NamedTuple):
    """How the next token is chosen, in token ids only. Text-level rules (stop strings) live in the router.

    `seed` is always set: the router draws one where the client gave none, so that the token at
    position i depends only on the logits and (seed, i), on whichever node and attempt it is drawn.
    """

    seed: int
    max_tokens: int
    """Generated tokens over all attempts, the first included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was generated before."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in the prompt or generated before."""
    logit_bias: list[tuple[int, float]] = []
    """(token id, what is added to its logit). Like every message, it is not changed once it is made."""
    min_tokens: int = 0
    """Until so many tokens are generated, no token of `stop_token_ids` can be drawn."""
    stop_token_ids: list[int] = []
    """The client's, and the model's end-of-sequence ids unless `ignore_eos`."""
    logprobs: int | None = None
    """None: none. n >= 0: the drawn token's, and those of the n most likely."""


@dataclass(frozen=True)
class PeerRef:
    """Where a node's present incarnation can be reached."""

    __pydantic_config__ = _STRICT
    node_id: str
    incarnation: str
    control_address: str
    """Address of the leader's control socket, `tcp://HOST:PORT`."""
    data_addresses: list[str]
    """ZMQ endpoint of each rank's data socket, in rank order. Empty for nodes that only send."""


class EngineRequest(NamedTuple):
    """All that an engine must know of a client's request, from the router to the engine's sequence.

    A new property of requests is a field here: the messages to both nodes and `Sequence` carry the record whole.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    """Prompts share cached blocks only with prompts of the same salt."""
    priority: int = 0
    """Lower runs earlier; equal ones in order of arrival."""


# ---------------------------------------------------------------- router -> node


class PrefillRequest(NamedTuple):
    """Compute the KV of `token_ids`, relay it to `decode`, sample one token."""

    key: AttemptKey
    request: EngineRequest
    generated_ids: list[int]
    """Tokens of earlier attempts, which the client has already."""
    decode: PeerRef
    timeout_s: float
    """The node gives up this long after arrival, and frees everything without an answer."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt, then the tokens of earlier attempts."""
        return self.request.prompt_ids + self.generated_ids


class DecodeRequest(NamedTuple):
    """Generate after `token_ids`. Their KV comes from `prefill`, or is computed here when that is None."""

    key: AttemptKey
    request: EngineRequest
    generated_ids: list[int]
    """Tokens of earlier attempts, which the client has already."""
    prefill: PeerRef | None
    timeout_s: float
    """The node gives up this long after arrival, and frees everything without an answer."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt, then the tokens of earlier attempts."""
        return self.request.prompt_ids + self.generated_ids


@dataclass(frozen=True)
class Abort:
    """Stop this attempt and free what it holds. No answer; unknown keys are ignored."""

    __pydantic_config__ = _STRICT
    key: AttemptKey


@dataclass(frozen=True)
class Ping:
    """The router's lease on a node: a node that hears none for `lease_s` aborts that router's requests.

    With `lease_s` 0 it only asks (a health probe); no lease begins.
    """

    __pydantic_config__ = _STRICT
    router_id: str
    lease_s: float


# ---------------------------------------------------------------- node -> router


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one generated position: of the drawn token, and of the most likely ones."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


FinishReason = Literal["stop", "length"]


class AttemptStats(NamedTuple):
    """How an attempt was served; sent by each leg with its first chunk."""

    cached_tokens: int = 0
    """Prompt tokens whose KV this node already held."""
    relayed_bytes: int = 0
    queue_s: float = 0.0
    """From arrival to the first step that ran it."""
    prefill_s: float = 0.0
    """From that step to the first token, where this node computed the prompt."""
    computed_tokens: int = 0
    """Prompt tokens that this node computed, after `cached_tokens` that it held."""
    transfer_s: float = 0.0
    """On a decode node: how long the KV was still missing once the first token was known."""


class TokenChunk(NamedTuple):
    """Tokens generated for one attempt. A chunk with a `finish_reason` is the attempt's last message."""

    key: AttemptKey
    start: int
    """Index of the first of `token_ids` among all generated tokens of the request."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stats: AttemptStats | None = None


@dataclass(frozen=True)
class TokenBatch:
    """All that one step generated for one router."""

    __pydantic_config__ = _STRICT
    chunks: list[TokenChunk]


@dataclass(frozen=True)
class AttemptFailed:
    """This leg of the attempt ended without finishing; terminal for the leg. `code` is from `common.base.errors`."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    code: str
    message: str


@dataclass(frozen=True)
class NodeLoad:
    """A node's load and counters, as of now. Counters are since the incarnation began."""

    __pydantic_config__ = _STRICT
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Prompt tokens accepted and not yet computed."""
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    step_age_s: float = 0.0
    """Since the engine loop last came round or, while steps are in flight beside it, since one of these last ended; large
    means that it is stuck."""
    prompt_tokens: int = 0
    prompt_busy_s: float = 0.0
    """Seconds of steps that computed prompts; `prompt_tokens` over it is the node's speed."""
    step_s: float = 0.0
    """Mean duration of recent steps that decoded."""
    generated_tokens: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    preemptions: int = 0
    relayed_bytes: int = 0
    relayed_by: dict[str, int] = field(default_factory=dict[str, int])
    """The same by transport."""
    local_prefills: int = 0
    transfers_failed: int = 0
    draining: bool = False
    """It finishes what it has and is to get nothing new."""


@dataclass(frozen=True)
class Pong:
    """Answer to `Ping`."""

    __pydantic_config__ = _STRICT
    node_id: str
    incarnation: str
    load: NodeLoad


# ---------------------------------------------------------------- prefill leader <-> decode leader


@dataclass(frozen=True)
class Offer:
    """The prefill node is about to compute this attempt and wants to know where its KV should go."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    src: PeerRef
    layout: KVLayout
    num_tokens: int
    block_hashes: list[bytes]
    """One per block of the sequence, the partial last one included; see `common.base.hashing`."""


@dataclass(frozen=True)
class Grant:
    """The decode node has room. The first `held_blocks` blocks are there already and must not be sent."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    dst: PeerRef
    layout: KVLayout
    held_blocks: int
    block_ids: list[int]
    """Destination of every block of the sequence (all of them, held ones first); one-sided transports write there."""


@dataclass(frozen=True)
class PrefillDone:
    """The first token, for the decode node. With a `finish_reason` the request ended there."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class TransferReceived:
    """Every slice of the transfer is in and verified."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    bytes_received: int


@dataclass(frozen=True)
class TransferAbort:
    """Either end gives the transfer up. `code` is from `common.base.errors`."""

    __pydantic_config__ = _STRICT
    key: AttemptKey
    code: str
    message: str


# ---------------------------------------------------------------- node -> Redis

Role = Literal["prefill", "decode"]
Tier = Literal["device", "host", "disk"]
"""Which of a node's memories a block is in; `device` is the one that it computes in."""


@dataclass(frozen=True)
class ModelInfo:
    """What a router must know of the model that a node serves."""

    __pydantic_config__ = _STRICT
    name: str
    path: str
    vocab_size: int
    max_model_len: int
    """Prompt and generated tokens together."""
    tokenizer: str = ""
    """Digest of the tokenizer's file (`common.model.fingerprint`); empty where the model folder has none."""


@dataclass(frozen=True)
class NodeRecord:
    """A node's registration; lives in Redis as long as the node renews its lease."""

    __pydantic_config__ = _STRICT
    role: Role
    peer: PeerRef
    model: ModelInfo
    layout: KVLayout
    kv_blocks_total: int
    started_at: float
    """Unix seconds."""
    max_num_seqs: int = 64
    """Sequences that it runs at once."""
    admin_address: str = ""
    """URL of its admin port; empty without one."""


Message = (
    PrefillRequest
    | DecodeRequest
    | Abort
    | Ping
    | TokenBatch
    | AttemptFailed
    | Pong
    | Offer
    | Grant
    | PrefillDone
    | TransferReceived
    | TransferAbort
    | NodeRecord
)


# msgpack has no types of its own.
_pack = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


class Codec:
    """One link's set of message types and their MessagePack form, `[PROTOCOL_VERSION, type name, body]`.

    Invariant: what `decode` returns is one of the given types with every field of its declared type.
    """

    def __init__(self, *types: type[Any]) -> None:
        self._adapters: dict[str, TypeAdapter[Any]] = {cls.__name__: TypeAdapter(cls) for cls in types}

    def encode(self, message: object) -> bytes:
        """One message as MessagePack bytes. Raises: ProtocolError for values that MessagePack cannot hold."""
        try:
            return self._pack(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error

    def _pack(self, message: object) -> bytes:
        return _pack([PROTOCOL_VERSION, type(message).__name__, message], default=vars)

    def decode(self, data: bytes | memoryview) -> Any:
        """The message in `data`.

        Raises: ProtocolError for anything that is not a well-formed message of this version.
        """
        return self.check(unpack(data))

    def check(self, envelope: object) -> Any:
        """The message that was unpacked to `envelope`. Raises: as `decode`."""
        if not isinstance(envelope, list) or len(cast("list[Any]", envelope)) != 3:
            raise ProtocolError("not a [version, type, body] envelope")
        version, name, body = cast("list[Any]", envelope)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version differs: theirs is {version!r}, ours is {PROTOCOL_VERSION}")
        adapter = self._adapters.get(name) if isinstance(name, str) else None
        if adapter is None:
            raise ProtocolError(f"unknown message type {str(name)[:64]!r}")
        try:
            return adapter.validate_python(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ProtocolError(f"malformed {name}: {place}: {first['msg']}") from error
        except (KvRelayError, ArithmeticError, TypeError) as error:  # a dataclass's own check of its values
            raise ProtocolError(f"malformed {name}: {error}") from error


def unpack(data: bytes | bytearray | memoryview) -> object:
    """The one MessagePack value in `data`. Raises: ProtocolError for anything else."""
    try:
        return _unpack(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not MessagePack: {error}") from error


_SHARED_FIELDS = 3
"""Number of leading fields that the two requests of one attempt have in common; their peers come next."""
_HEADS = {
    cls: b"\x93" + _pack([PROTOCOL_VERSION, cls.__name__])[1:] + bytes([0x90 + len(cls._fields)])
    for cls in (PrefillRequest, DecodeRequest)
}
"""A request up to its first field. MessagePack gives the length of an array of up to 15 in its first byte."""


class _ControlCodec(Codec):
    """Packs the fields that the two requests of an attempt share only once: one is sent right after the other."""

    _latest: tuple[tuple[Any, ...], bytes] = (), b""
    """Shared fields of the latest request, and their packed form."""

    def _pack(self, message: Any) -> bytes:
        head = _HEADS.get(cast("type[Any]", type(message)))
        if head is None:
            return super()._pack(message)
        shared = message[:_SHARED_FIELDS]
        known, packed = self._latest
        if shared != known:
            packed = _pack(shared, default=vars)[1:]
            self._latest = shared, packed
        return b"".join((head, packed, _pack(message[_SHARED_FIELDS:], default=vars)[1:]))


_CODEC = _ControlCodec(*get_args(Message))


def encode(message: Message) -> bytes:
    """One control message as MessagePack bytes. Raises: ProtocolError for values that MessagePack cannot hold."""
    return _CODEC.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The control message in `data`.

    Raises: ProtocolError for anything that is not a well-formed message of this version.
    """
    return _CODEC.decode(data)


def join(messages: list[bytes]) -> bytes:
    """A frame of a control link: an array of messages, each of them as `encode` gave it."""
    count = len(messages)
    head = bytes([0x90 + count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(messages)


def split(frame: bytes | bytearray) -> list[object]:
    """The messages of a frame, each to be looked at with `check`. Raises: ProtocolError if it is no frame."""
    envelopes = unpack(frame)
    if not isinstance(envelopes, list):
        raise ProtocolError("not an array of messages")
    messages = cast("list[object]", envelopes)
    if messages and isinstance(messages[0], int):  # before version 3 a frame was one message, which began with this
        raise ProtocolError(f"protocol version differs: theirs is {messages[0]}, ours is {PROTOCOL_VERSION}")
    return messages


def check(envelope: object) -> Message:
    """One of the messages that `split` gave. Raises: as `decode`."""
    return _CODEC.check(envelope)

"""Encodes node records and lists of loaded adapters for Redis, where services of the protocol version before read them too.

With `--tls-dir` they are signed with the node's key, so that access to Redis alone is not enough to announce a node. Runs on
the asyncio loop of its process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.base.clock import Clock
from common.base.errors import ConfigError, ProtocolError
from common.base.message_types import StrictFields
from common.control.codec import Codec, decode, encode
from common.control.messages import Adapter, NodeRecord
from common.control.versions import OLDEST_VERSION

log = logging.getLogger(__name__)

_CHECK_AGAIN_S = 3.0
"""Pause before a refused record is checked again."""


@dataclass(frozen=True)
class SignedRecord(StrictFields):
    """A node's record with the signature of its node; the signature covers the cluster's name too."""

    certificate: bytes
    signature: bytes
    record: bytes


@dataclass(frozen=True)
class LoadedAdapters(StrictFields):
    """The LoRA adapters that were loaded into a running node; the node's next process loads them again."""

    node_id: str
    adapters: list[Adapter]
    paths: list[str]
    """Folder of each adapter."""
    owners: list[str | None] = field(default_factory=list[str | None])
    """The client that loaded each adapter; None: an operator."""


class EncodedRecord(NamedTuple):
    """A node's record as it is in Redis."""

    readable: bytes
    """In the oldest protocol version that can express it, so that every router that can use the node reads it."""
    newest: bytes = b""
    """In its newest version, if it has fields that the oldest lacks; else empty."""


_CODEC = Codec(SignedRecord, LoadedAdapters, version=OLDEST_VERSION)


class Records:
    """Encodes and decodes the records of one cluster. tls_dir: the service's folder; None means records without a signature.

    Raises: ConfigError if the package that signs is missing.
    """

    def __init__(self, cluster: str, tls_dir: str | None) -> None:
        self._cluster = cluster.encode() + b"\0"
        self._signer = None
        if tls_dir is not None:
            from common.security.signatures import Signer

            self._signer = Signer(Path(tls_dir))

    @property
    def signed(self) -> bool:
        """Whether records without a valid signature are refused."""
        return self._signer is not None

    @property
    def must_sign_again(self) -> bool:
        """Whether the node has got a new certificate since it last signed; the old one expires."""
        return self._signer is not None and self._signer.is_renewed

    def encode(self, record: NodeRecord) -> EncodedRecord:
        """Encode a node's record, signed if records are. A record that only new routers understand is encoded for these, and
        older ones refuse it. Raises: ConfigError if the node's key cannot be used."""
        newest = encode(record)
        try:
            readable = encode(record, OLDEST_VERSION)
        except ProtocolError:
            return EncodedRecord(self._sign(newest))
        return EncodedRecord(self._sign(readable), b"" if decode(readable) == record else self._sign(newest))

    def encode_loaded(self, loaded: LoadedAdapters) -> bytes:
        """Encode a list of loaded adapters; the empty list is b"". Raises: ConfigError if the node's key cannot be used."""
        return self._sign(_CODEC.encode(loaded)) if loaded.adapters else b""

    def decode_loaded(self, raw: bytes | None, node_id: str) -> LoadedAdapters | None:
        """Decode the list that node `node_id` wrote. If it is malformed or not signed by that node, log that and return None."""
        if not raw:
            return LoadedAdapters(node_id, [], [])
        try:
            found = _CODEC.decode(self._opened(raw))
            if not isinstance(found, LoadedAdapters) or found.node_id != node_id:
                raise ProtocolError("it belongs to another node")
            found = replace(found, owners=found.owners or [None] * len(found.paths))  # an earlier version wrote none
            if not len(found.adapters) == len(found.paths) == len(found.owners):
                raise ProtocolError("it has different numbers of folders, owners and adapters")
        except (ProtocolError, ConfigError) as error:
            log.warning("the list of LoRA adapters that had been loaded into this node is refused: %s", error)
            return None
        return found

    def decode(self, raw: bytes | str | None) -> NodeRecord | None:
        """Decode a node's record. If it is malformed or not signed by a node of this cluster, log that and return None."""
        if not isinstance(raw, bytes):
            return None
        try:
            return self.check(raw)
        except (ProtocolError, ConfigError) as error:
            log.warning("malformed node record: %s", error)
            return None

    def check(self, raw: bytes, newest: bytes = b"") -> NodeRecord:
        """Decode a node's record, and use the one in the newest version if it is of the same process and can be read.

        Raises: ProtocolError or ConfigError if `raw` is malformed or no node of this cluster signed it.
        """
        message = decode(self._opened(raw))
        if not isinstance(message, NodeRecord):
            raise ProtocolError(f"it is a {type(message).__name__}")
        with contextlib.suppress(ProtocolError, ConfigError):  # it may be of a version that is too new here
            fuller = self.check(newest) if newest else message
            return fuller if fuller.peer.incarnation == message.peer.incarnation else message
        return message

    def _sign(self, plain: bytes) -> bytes:
        if self._signer is None:
            return plain
        return _CODEC.encode(SignedRecord(*self._signer.sign(self._cluster + plain), plain))

    def _opened(self, raw: bytes) -> bytes:
        """Check the signature and return the content that it covers. Raises: ProtocolError, ConfigError."""
        if self._signer is None:
            return raw
        signed = _CODEC.decode(raw)
        if not isinstance(signed, SignedRecord):
            raise ProtocolError("it is not signed")
        self._signer.check(self._cluster + signed.record, signed.certificate, signed.signature, "node")
        return signed.record


class _Checked(NamedTuple):
    """A record that was checked: the result, or why it is refused, and when it was checked."""

    raw: EncodedRecord
    record: NodeRecord | None
    why_refused: str
    at_s: float


class CheckedRecords:
    """Checks the nodes' records, each when it changes.

    A refused record is checked again every `_CHECK_AGAIN_S`, because the cause may go away without a change of the record:
    this service's folder of certificates was half copied, or a clock was behind.
    """

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock
        self._checked: dict[str, _Checked] = {}

    @property
    def refused(self) -> dict[str, str]:
        """Node id -> why its record is refused."""
        return {node_id: each.why_refused for node_id, each in self._checked.items() if each.record is None}

    def read(self, raw_records: Mapping[str, EncodedRecord]) -> dict[str, NodeRecord]:
        """Return the valid records by node id. Each refused node is logged once, and again if the reason changes."""
        self._checked = {node_id: self._check(node_id, raw) for node_id, raw in raw_records.items()}
        return {node_id: each.record for node_id, each in self._checked.items() if each.record is not None}

    def _check(self, node_id: str, raw: EncodedRecord) -> _Checked:
        known, now_s = self._checked.get(node_id), self._clock()
        if known and known.raw == raw and (known.record or now_s - known.at_s < _CHECK_AGAIN_S):
            return known
        try:
            record = self._records.check(*raw)
            if record.peer.node_id != node_id:
                raise ProtocolError(f"it belongs to node {record.peer.node_id!r}")
        except (ProtocolError, ConfigError) as error:
            reason = str(error)
            if known is None or known.why_refused != reason:
                log.error("ignoring node %r: its record in Redis is refused: %s", node_id, reason)
            return _Checked(raw, None, reason, now_s)
        return _Checked(raw, record, "", now_s)

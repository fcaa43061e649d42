"""The core of a prefill node: what it does on every event. Runs on the engine's thread, does no I/O itself.

One attempt here: queued -> admitted (blocks taken, offered to the decode node) -> computed chunk by chunk,
each layer relayed as it becomes final -> first token out -> source blocks released -> forgotten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from common.base.clock import Clock
from common.base.errors import (
    EngineError,
    KvRelayError,
    PeerLost,
    TransferAborted,
    from_code,
)
from common.base.hashing import BLOCK_SIZE, hash_blocks
from common.control.links import Identity
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptStats,
    Grant,
    Offer,
    PeerRef,
    PrefillDone,
    PrefillRequest,
    TransferAbort,
    TransferReceived,
)
from common.engine.executor import Executor
from common.engine.kv_transfer import KVSender, OutgoingTransfer, SourceReleased
from common.engine.scheduler import Progress, Scheduler
from common.kv.layout import KVLayout, check_compatible
from common.node.core import Attempt, NodeCore, token_chunk
from common.node.events import FromClient, FromPeer, PeerGone, SendBuffer
from kvtransfer.traffic import count_bytes

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Attempt(Attempt):
    request: PrefillRequest
    offered: bool = False
    """The sender knows it: its blocks are free only after `SourceReleased`."""
    reported: bool = False
    """The router has had its first token."""
    received: bool = False
    """The decode node has every slice."""
    ended: bool = False
    """Nobody wants anything of it any more; it only waits for its blocks."""


class PrefillNode(NodeCore[_Attempt]):
    """All attempts of one prefill node. Invariant: when `attempts` is empty, no block is used."""

    def __init__(
        self,
        me: PeerRef,
        layout: KVLayout,
        vocab_size: int,
        scheduler: Scheduler,
        executor: Executor,
        sender: KVSender,
        send_buffer: SendBuffer,
        clock: Clock,
        *,
        max_accepted: int,
        transfer_timeout_s: float,
    ) -> None:
        super().__init__(me, layout, vocab_size, scheduler, executor, send_buffer, clock, max_accepted=max_accepted)
        self.sender = sender
        self.transfer_timeout_s = transfer_timeout_s

    # ------------------------------------------------------------ events

    def handle(self, event: object) -> None:
        match event:
            case FromClient(identity, PrefillRequest() as request):
                self._accept(identity, request)
            case FromClient(_, Abort(key)):
                self._end(self.attempts.get(key))
            case FromPeer(incarnation, Grant() as grant):
                self._granted(incarnation, grant)
            case FromPeer(_, TransferAbort(key, code, message)):
                self._fail(self.attempts.get(key), from_code(code, message))
            case FromPeer(_, TransferReceived(key)):
                self._received(self.attempts.get(key))
            case SourceReleased(key, bytes_sent, error, traffic):
                count_bytes(self._relayed_by, traffic)
                self._released(self.attempts[key], bytes_sent, error)
            case PeerGone(incarnation, reason):
                self.sender.disconnect(incarnation)
                for attempt in [a for a in self.attempts.values() if a.request.decode.incarnation == incarnation]:
                    self._fail(attempt, PeerLost(f"decode node lost: {reason}"))
            case _:
                super().handle(event)

    def _describe(self, attempt: _Attempt) -> dict[str, Any]:
        return {
            "state": self._state(attempt),
            "prompt_tokens": attempt.seq.num_tokens,
            "computed_tokens": attempt.seq.num_computed,
            "decode_node": attempt.request.decode.node_id,
        }

    def _state(self, attempt: _Attempt) -> str:
        if attempt.ended:
            return "ended, its blocks are still being sent"
        if attempt.reported:
            return "first token out, KV is being relayed"
        return "waiting" if attempt.seq.first_step_s is None else "computing"

    # ------------------------------------------------------------ one attempt

    def _accept(self, identity: Identity, request: PrefillRequest) -> None:
        seq = self._take(identity, request)
        if seq is None:
            return
        self.attempts[request.key] = _Attempt(identity, seq, seq.arrival_s + request.timeout_s, request)
        self.scheduler.add(seq)

    def _admitted(self, attempt: _Attempt) -> None:
        """Offer it to the decode node."""
        seq = attempt.seq
        hashes = hash_blocks(seq.root, seq.token_ids, parents=seq.full_block_hashes(), include_partial=True)
        attempt.offered = True
        self.sender.open(
            OutgoingTransfer(
                key=seq.key,
                src_incarnation=self.me.incarnation,
                src_blocks=list(seq.blocks),
                block_hashes=hashes,
                num_tokens=seq.num_tokens,
                timeout_s=self.transfer_timeout_s,
                final_blocks=seq.num_computed // BLOCK_SIZE,
            )
        )
        self.send_buffer.to_peer(
            attempt.request.decode, Offer(seq.key, self.me, self.layout, seq.num_tokens, block_hashes=hashes)
        )

    def _granted(self, incarnation: str, grant: Grant) -> None:
        attempt = self.attempts.get(grant.key)
        if attempt is None or incarnation != attempt.request.decode.incarnation:
            return
        try:
            check_compatible(self.layout, grant.layout)
        except KvRelayError as error:
            self._fail(attempt, error)
            return
        self.sender.grant(grant)

    def _tokens(self, attempt: _Attempt, done: Progress) -> None:
        seq, now_s = attempt.seq, self.clock()
        started_s = seq.first_step_s if seq.first_step_s is not None else now_s
        stats = AttemptStats(
            cached_tokens=seq.cached_tokens,
            queue_s=started_s - seq.arrival_s,
            prefill_s=now_s - started_s,
            computed_tokens=seq.num_tokens - 1 - seq.cached_tokens,
        )
        chunk = token_chunk(done, stats)
        if not attempt.ended:
            self.send_buffer.tokens(attempt.identity, chunk)
            self.send_buffer.to_peer(
                attempt.request.decode, PrefillDone(seq.key, chunk.token_ids[0], done.finish_reason)
            )
        attempt.reported = True
        # With a finish nobody will decode: what is not yet sent need not be, and no failure matters any more.
        if not attempt.offered or attempt.received or done.finish_reason is not None:
            self._end(attempt)

    def _received(self, attempt: _Attempt | None) -> None:
        """The decode node has every slice: whether the last acks still come does not matter any more."""
        if attempt is None:
            return
        attempt.received = True
        if attempt.reported:
            self._end(attempt)

    def _released(self, attempt: _Attempt, bytes_sent: int, error: Exception | None) -> None:
        attempt.offered = False
        self._relayed_bytes += bytes_sent
        if error is not None and not (attempt.ended or attempt.received or isinstance(error, TransferAborted)):
            self._transfers_failed += 1
            self._fail(
                attempt, error if isinstance(error, KvRelayError) else EngineError(f"the transfer failed: {error}")
            )
        # Before the first token: the decode node held every block already. It is still to be computed.
        elif attempt.reported or attempt.ended:
            self._end(attempt)

    def _fail(self, attempt: _Attempt | None, error: KvRelayError) -> None:
        """Tell both the router and the decode node, then forget."""
        if attempt is None or attempt.ended:
            return
        key = attempt.seq.key
        log.warning("%s failed: %s", key, error.message)
        self.send_buffer.reply(attempt.identity, AttemptFailed(key, error.code, error.message))
        self.send_buffer.to_peer(attempt.request.decode, TransferAbort(key, error.code, error.message))
        self._end(attempt)

    def _end(self, attempt: _Attempt | None) -> None:
        """Free what the attempt holds; what the sender still reads, when it says so."""
        if attempt is None or (attempt.ended and attempt.offered):
            return
        attempt.ended = True
        if attempt.seq.key in self.scheduler.running or attempt.seq in self.scheduler.waiting:
            self.scheduler.abort(attempt.seq)
        if attempt.offered:
            self.sender.abort(attempt.seq.key)
        else:
            self.scheduler.free(attempt.seq)
            self.attempts.pop(attempt.seq.key, None)

"""The core of a prefill node: what it does on every event. Runs on the engine's thread, does no I/O itself.

The life of an attempt, by `Phase`: queued; admitted (its blocks allocated, an offer sent to the decode node) and computed
chunk by chunk, each layer relayed as it becomes final; first token out; source blocks released; forgotten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

from common.base.errors import EngineError, KvRelayError, PeerLost, TransferAborted, from_code
from common.base.hashing import BLOCK_SIZE, hash_blocks
from common.control.links import Identity
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptStats,
    Grant,
    Offer,
    PrefillDone,
    PrefillRequest,
    TransferAbort,
    TransferReceived,
)
from common.engine.kv_allocator import first_kept
from common.engine.kv_transfer import SourceReleased, TransferPlan
from common.engine.scheduled_step import SequenceOutput
from common.engine.sequence_state import SequenceState
from common.kv.rank_layout import check_compatible
from common.node.attempt import Attempt, token_chunk
from common.node.core import NodeCore
from common.node.events import FromClient, FromPeer, PeerGone

log = logging.getLogger(__name__)


class Phase(Enum):
    """Where an attempt stands on this node. Each value is also what operators read."""

    QUEUED = "waiting"
    COMPUTING = "computing"
    """Offered; its KV goes out as it is computed, once the decode node has granted it."""
    RECEIVED = "computing, the decode node has all KV"
    """Until `SourceReleased` the sender still holds the source blocks."""
    RELEASED = "computing, the relay has ended"
    """The sender holds nothing any more; the first token is still to come, or the attempt is about to end."""
    RELAYING = "first token out, KV is being relayed"
    ENDING = "ended, its blocks are still being sent"


_READ_BY_SENDER = (Phase.COMPUTING, Phase.RECEIVED, Phase.RELAYING)
"""The sender may read the blocks until it reports `SourceReleased`."""


@dataclass(eq=False)
class _Attempt(Attempt):
    request: PrefillRequest
    phase: Phase = Phase.QUEUED


class PrefillNode(NodeCore[_Attempt]):
    """All attempts of one prefill node. Invariant: when `attempts` is empty, no block is used."""

    # ------------------------------------------------------------ events

    def handle(self, event: object) -> None:
        match event:
            case FromClient(identity, PrefillRequest() as request):
                self._accept(identity, request)
            case FromClient(_, Abort(key)):
                self._end(self.attempts.get(key), "aborted")
            case FromPeer(incarnation, Grant() as grant):
                self._granted(incarnation, grant)
            case FromPeer(_, TransferAbort(key, code, message)):
                self._fail(self.attempts.get(key), from_code(code, message))
            case FromPeer(_, TransferReceived(key)):
                self._received(self.attempts.get(key))
            case SourceReleased(key, bytes_sent, error, traffic):
                for moved in traffic:
                    self._relayed_by[moved.transport] += moved.size_bytes
                self._released(self.attempts[key], bytes_sent, error)
            case PeerGone(incarnation, reason):
                self.transfers.disconnect(incarnation)
                for attempt in [a for a in self.attempts.values() if a.request.decode.incarnation == incarnation]:
                    self._fail(attempt, PeerLost(f"decode node lost: {reason}"))
            case _:
                super().handle(event)

    def _describe(self, attempt: _Attempt) -> dict[str, Any]:
        return {
            "state": (attempt.seq.state if attempt.phase is Phase.QUEUED else attempt.phase).value,
            "prompt_tokens": attempt.seq.num_tokens,
            "computed_tokens": attempt.seq.progress.num_computed,
            "decode_node": attempt.request.decode.node_id,
        }

    # ------------------------------------------------------------ one attempt

    def _accept(self, identity: Identity, request: PrefillRequest) -> None:
        seq = self.admit(identity, request)
        if seq is None:
            return
        attempt = _Attempt(identity, seq, seq.arrival_s + request.timeout_s, request)
        self.attempts[request.key] = attempt
        self.prepare(attempt)

    def on_ready(self, attempt: _Attempt) -> None:
        self.scheduler.add(attempt.seq)

    def on_started(self, attempt: _Attempt) -> None:
        """Offer it to the decode node."""
        seq = attempt.seq
        hashes = hash_blocks(seq.root, seq.tokens.ids, parents=seq.full_block_hashes(), include_partial=True)
        attempt.phase = Phase.COMPUTING
        self.transfers.open_source(
            TransferPlan(
                key=seq.key,
                blocks=[list(blocks) for blocks in seq.blocks.tables],
                first_blocks=[first_kept(seq.num_tokens, window) for window in self.layout.spec.windows],
                block_hashes=hashes,
                timeout_s=self.transfer_timeout_s,
            ),
            final_blocks=seq.progress.num_computed // BLOCK_SIZE,
        )
        attempt.mark("offer", self.clock())
        self.send_buffer.to_peer(
            attempt.request.decode, Offer(seq.key, self.me, self.layout, seq.num_tokens, hashes[-1])
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
        attempt.mark("grant", self.clock())
        self.transfers.grant(grant)

    def on_tokens(self, attempt: _Attempt, done: SequenceOutput) -> None:
        seq, now_s = attempt.seq, self.clock()
        started_s = seq.first_step_s if seq.first_step_s is not None else now_s
        stats = AttemptStats(
            cached_tokens=seq.cached_tokens,
            queue_s=started_s - seq.arrival_s,
            prefill_s=now_s - started_s,
            computed_tokens=seq.num_tokens - 1 - seq.cached_tokens,
            timeline=attempt.timeline,
        )
        chunk = token_chunk(done, stats)
        self.send_buffer.tokens(attempt.identity, chunk)
        self.send_buffer.to_peer(attempt.request.decode, PrefillDone(seq.key, chunk.token_ids[0], done.finish_reason))
        # The request has finished and nobody decodes: the rest of the KV need not be sent, and failures do not matter.
        if attempt.phase is Phase.COMPUTING and done.finish_reason is None:
            attempt.phase = Phase.RELAYING
        else:
            self._end(attempt, "first token")

    def _received(self, attempt: _Attempt | None) -> None:
        """The decode node has every slice: it no longer matters whether the last acknowledgements arrive."""
        if attempt is None:
            return
        if attempt.phase is Phase.COMPUTING:
            attempt.phase = Phase.RECEIVED
        elif attempt.phase is Phase.RELAYING:
            self._end(attempt, "all KV received")

    def _released(self, attempt: _Attempt, bytes_sent: int, error: Exception | None) -> None:
        """The sender no longer reads the source blocks."""
        self._relayed_bytes += bytes_sent
        was, attempt.phase = attempt.phase, Phase.RELEASED
        failed = error is not None and not isinstance(error, TransferAborted)
        if failed and was in (Phase.COMPUTING, Phase.RELAYING):
            self._transfers_failed += 1
            self._fail(
                attempt, error if isinstance(error, KvRelayError) else EngineError(f"the transfer failed: {error}")
            )
        elif was in (Phase.RELAYING, Phase.ENDING):
            self._end(attempt, "relayed")

    def _fail(self, attempt: _Attempt | None, error: KvRelayError) -> None:
        """Tell both the router and the decode node, then end it."""
        if attempt is None or attempt.phase is Phase.ENDING:
            return
        key = attempt.seq.key
        log.warning("%s failed: %s", key, error.message)
        self.send_buffer.reply(attempt.identity, AttemptFailed(key, error.code, error.message))
        self.send_buffer.to_peer(attempt.request.decode, TransferAbort(key, error.code, error.message))
        self._end(attempt, error.code)

    def _end(self, attempt: _Attempt | None, reason: str) -> None:
        """Free what the attempt holds; blocks that the sender still reads are freed when it releases them."""
        if attempt is None or attempt.phase is Phase.ENDING:
            return
        seq = attempt.seq
        self.scheduler.end(seq, reason)
        if attempt.phase in _READ_BY_SENDER:
            attempt.phase = Phase.ENDING
            self.transfers.abort(seq.key)
            return
        if seq.state is SequenceState.HELD:
            self.scheduler.free(seq)
        del self.attempts[seq.key]

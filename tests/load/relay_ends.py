"""Two processes that relay KV over the project's ZMQ transport, and nothing else. Worker classes."""

from __future__ import annotations

import random
import threading
import time
import zlib
from typing import Any

import numpy as np

from common.hashing import BLOCK_SIZE, hash_blocks, root_hash
from common.kv.layout import KVLayout, blocks_for
from common.kv.storage import KVStorage
from common.protocol import AttemptKey, Grant, PeerRef
from kvtransfer.base import (
    IncomingTransfer,
    OutgoingTransfer,
    Received,
    ReceiveFailed,
    ReceiverEvent,
    SenderEvent,
    SourceReleased,
)
from kvtransfer.zmq import ZmqReceiver, ZmqSender

_TIMEOUT_S = 60.0


class _End:
    """What both processes have: storage at the model's layout, and the blocks of each transfer."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, tokens: int, transfers: int, shuffled: bool, seed: int
    ) -> None:
        self.layout = KVLayout("bench", layers, kv_heads, head_dim, "bfloat16")
        each = blocks_for(tokens)
        self.storage = KVStorage(self.layout, self.layout.shard(0, 0), each * transfers)
        self.tokens = tokens
        blocks = list(range(each * transfers))
        if shuffled:
            random.Random(seed).shuffle(blocks)
        self.blocks = [blocks[i * each : (i + 1) * each] for i in range(transfers)]
        root = root_hash("bench")
        self.hashes = [hash_blocks(root, [i + 1] * (each * BLOCK_SIZE), include_partial=True) for i in range(transfers)]
        self.done = threading.Condition()
        self.left: set[AttemptKey] = set()
        self.errors: list[str] = []
        self.round = 0

    def keys(self) -> list[AttemptKey]:
        """Of this round's transfers."""
        return [AttemptKey(f"bench-{i}", self.round) for i in range(len(self.blocks))]

    def ended(self, key: AttemptKey, error: Exception | None) -> None:
        """One transfer is over at this end; on the transport's thread."""
        with self.done:
            self.left.discard(key)
            if error is not None:
                self.errors.append(str(error))
            self.done.notify_all()

    def wait(self) -> None:
        """Until all of this round's transfers are over here. Raises: RuntimeError."""
        with self.done:
            if not self.done.wait_for(lambda: not self.left or self.errors, _TIMEOUT_S):
                raise RuntimeError(f"{len(self.left)} transfers did not end within {_TIMEOUT_S:.0f} s")
        if self.errors:
            raise RuntimeError(self.errors[0])

    def checksum(self) -> int:
        """Of all transfers' KV, in order of the sequence's blocks."""
        words = self.storage.words
        assert words is not None
        value = 0
        for blocks in self.blocks:
            value = zlib.crc32(words[:, :, blocks].tobytes(), value)
        return value


class RelaySource(_End):
    """The prefill side: every block final from the start, all transfers granted at once."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes, seed=1)
        words = self.storage.words
        assert words is not None
        words[...] = np.random.default_rng(1).integers(0, 2**16, size=words.shape, dtype=words.dtype)
        self.sender = ZmqSender(self.storage, self.layout, 0, self._on_event)

    def _on_event(self, event: SenderEvent) -> None:
        if isinstance(event, SourceReleased):
            self.ended(event.key, event.error)

    def send(self, address: str) -> float:
        """Send everything once. Returns when the grants were given (`time.perf_counter`)."""
        self.round += 1
        keys = self.keys()
        self.left = set(keys)
        dst = PeerRef("dst", "1" * 16, "none", [address])
        for key, blocks, hashes in zip(keys, self.blocks, self.hashes, strict=True):
            self.sender.open(OutgoingTransfer(key, "0" * 16, blocks, hashes, self.tokens, _TIMEOUT_S))
            for layer in range(self.layout.num_layers):
                self.sender.blocks_final(key, layer, len(blocks))
        started = time.perf_counter()
        for key, blocks in zip(keys, self.blocks, strict=True):
            self.sender.grant(Grant(key, dst, self.layout, 0, blocks))
        self.wait()
        return started

    def close(self) -> None:
        """Stop the transport."""
        self.sender.close()


class RelayDestination(_End):
    """The decode side: opens all transfers, then waits until every slice is in and verified."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes, seed=2)
        self.received = 0
        self.receiver = ZmqReceiver(self.storage, self.layout, 0, "127.0.0.1", 0, self._on_event)

    def _on_event(self, event: ReceiverEvent) -> None:
        if isinstance(event, ReceiveFailed):
            self.ended(event.key, event.error)
        elif isinstance(event, Received):
            self.received += event.bytes_received
            self.ended(event.key, None)

    def address(self) -> str:
        """Where to send."""
        return self.receiver.address

    def expect(self) -> None:
        """Open all transfers."""
        self.round += 1
        self.received = 0
        keys = self.keys()
        self.left = set(keys)
        src = PeerRef("src", "0" * 16, "none", [])
        for key, blocks, hashes in zip(keys, self.blocks, self.hashes, strict=True):
            self.receiver.open(IncomingTransfer(key, src, self.layout, blocks, hashes, 0, _TIMEOUT_S))

    def arrived(self) -> tuple[float, int]:
        """Wait for everything. Returns when the last slice was in (`time.perf_counter`), and the bytes."""
        self.wait()
        return time.perf_counter(), self.received

    def close(self) -> None:
        """Stop the transport."""
        self.receiver.close()

"""Blocks that a pool has stored and removed since the last `take`. Written by the engine's thread, read by another."""

from __future__ import annotations

import threading
from collections.abc import Callable

from common.base.hashing import BlockHash


class BlockJournal:
    """Net changes of the block hashes that a pool holds.

    Invariant: a hash is in at most one of the two sets, so they are never larger than what the pool held at the last
    `take` plus what it holds now, however long ago that was.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()
        self._on_change: Callable[[], object] | None = None

    def notify_once(self, on_change: Callable[[], object] | None) -> None:
        """Call `on_change` at the next change, or now if there are changes to take; None cancels an earlier call.

        It is called once, by the thread that makes the change, and must neither block nor use the journal.
        """
        with self._lock:
            self._on_change = on_change
            if self._stored or self._removed:
                self._notify()

    def _notify(self) -> None:
        on_change, self._on_change = self._on_change, None
        if on_change is not None:
            on_change()

    def stored(self, block_hash: BlockHash) -> None:
        """Record that the pool now holds this content and did not before."""
        with self._lock:
            if block_hash in self._removed:
                self._removed.discard(block_hash)
            else:
                self._stored.add(block_hash)
            if self._on_change is not None:
                self._notify()

    def removed(self, block_hash: BlockHash) -> None:
        """Record that the pool no longer holds this content."""
        with self._lock:
            if block_hash in self._stored:
                self._stored.discard(block_hash)
            else:
                self._removed.add(block_hash)
            if self._on_change is not None:
                self._notify()

    def take(self) -> tuple[set[BlockHash], set[BlockHash]]:
        """(stored, removed) since the last call. Any thread."""
        with self._lock:
            taken = self._stored, self._removed
            self._stored, self._removed = set(), set()
        return taken

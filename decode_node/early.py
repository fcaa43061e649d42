"""Messages of prefill nodes that arrive before the router's `DecodeRequest` for their attempt."""

from __future__ import annotations

from common.control.links import Identity
from common.control.messages import AttemptKey, Offer, PrefillDone

_MAX_ATTEMPTS = 4096

Messages = list[tuple[Identity, Offer | PrefillDone]]
"""With the prefill node that sent each."""


class EarlyMessages:
    """Keeps the messages of at most 4,096 attempts, each attempt's for a fixed time after its first message."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a message waits, in seconds."""
        self.keep_s = keep_s
        self._kept: dict[AttemptKey, tuple[float, Messages]] = {}
        """With the time when they expire."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, identity: Identity, message: Offer | PrefillDone, now_s: float) -> Messages:
        """Keep a message. Returns those that had to make room for it."""
        evicted = []
        if message.key not in self._kept:
            if len(self._kept) >= _MAX_ATTEMPTS:
                evicted = self.take(next(iter(self._kept)))
            self._kept[message.key] = now_s + self.keep_s, []
        self._kept[message.key][1].append((identity, message))
        return evicted

    def take(self, key: AttemptKey) -> Messages:
        """Remove and return an attempt's messages, in the order of their arrival."""
        _, messages = self._kept.pop(key, (0.0, []))
        return messages

    def expired(self, now_s: float) -> Messages:
        """Remove and return the messages that have waited too long."""
        keys = [key for key, (expires_s, _) in self._kept.items() if now_s > expires_s]
        return [message for key in keys for message in self.take(key)]

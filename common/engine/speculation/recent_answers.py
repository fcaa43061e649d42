"""The latest answers of each tenant, in which drafts for its other sequences are found. Engine thread; pure.

What one tenant was told is never proposed to another: drafts that are accepted shorten steps, and a client could measure that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from common.engine.speculation.token_index import NOTHING, Proposal, TokenIndex

_TENANT_PART = 4
_MOST_OF_ONE = 4096
"""Tokens of one answer that are kept, its last ones: taking them in delays a step by about 2 ms."""


class _Tenant:
    """Two indexes of answers: when the newer one is full it replaces the older one, so that old answers leave without a search."""

    def __init__(self, max_candidates: int) -> None:
        self._max_candidates = max_candidates
        self._newer, self._older = (TokenIndex(max_candidates=max_candidates) for _ in range(2))

    @property
    def size(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, answer: Seq[int], max_tokens: int) -> None:
        if len(self._newer) + len(answer) > max_tokens // 2:
            self._older, self._newer = self._newer, TokenIndex(max_candidates=self._max_candidates)
        self._newer.add(answer)

    def find(self, tail: Seq[int], limit: int, above: int) -> Proposal:
        newer = self._newer.find(tail, limit, above)
        older = self._older.find(tail, limit, max(above, newer.match))
        return older if older.token_ids else newer


class RecentAnswers:
    """Invariant: at most `max_tokens` tokens in all, a quarter of them of one tenant; the tenant that was idle longest leaves
    first. A token takes about 300 bytes."""

    def __init__(self, max_tokens: int, max_candidates: int) -> None:
        """`max_candidates`: as of `TokenIndex`."""
        self._max_tokens = max_tokens
        self._max_candidates = max_candidates
        self._tenants: dict[str, _Tenant] = {}
        """The one used last is the last one."""
        self._size = 0

    def __len__(self) -> int:
        """Tokens in all. Asked for each draft, so it must not depend on the number of tenants."""
        return self._size

    def add(self, tenant: str, answer: Seq[int]) -> None:
        """Keep an answer of a tenant, if anything is kept at all."""
        if not self._max_tokens:
            return
        most = self._max_tokens // _TENANT_PART
        kept = answer[-min(_MOST_OF_ONE, most // 2) + 1 :]
        own = self._tenants.pop(tenant, None) or _Tenant(self._max_candidates)
        before = own.size
        own.add(kept, most)
        self._size += own.size - before
        self._tenants[tenant] = own
        while self._size > self._max_tokens:
            self._size -= self._tenants.pop(next(iter(self._tenants))).size

    def find(self, tenant: str, tail: Seq[int], limit: int, above: int) -> Proposal:
        """`TokenIndex.find` in the answers of one tenant."""
        own = self._tenants.get(tenant)
        return NOTHING if own is None else own.find(tail, limit, above)

"""Where a sequence is in its grammar. Engine thread; pure.

The tokens allowed at a position are a function of the grammar and of the tokens generated before it: every attempt and
node takes in the same ids from the first one on, and comes to the same masks.

Where the grammar leaves only one text, llguidance names the tokens that spell it. These *forced* tokens are the only ones
allowed at their positions, so they can be computed in one step, as drafts. Behind them a copy of the state follows tokens that
are only guessed (`follow`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import copy
from itertools import takewhile

from llguidance import LLMatcher

from common.base.errors import BadRequest
from common.control.messages import SamplingParams
from common.engine.grammar.compile import short_error

_BURST_S = 0.2
_PER_TOKEN_S = 0.003
"""Processor time that a sequence's grammar may take: at once, and for each token in addition. Beyond it the request
fails, so that a hostile grammar cannot slow down other requests. A usual grammar takes 0.1 ms for a token."""


class GrammarState:
    """One sequence's matcher. `take` tokens, then `prepare`; the masks are those of the next tokens."""

    def __init__(self, matcher: LLMatcher, sampling: SamplingParams, prompt_len: int, eos_ids: list[int]) -> None:
        """matcher: at the start of `sampling.grammar`, a copy for this sequence. eos_ids: those of the model.

        Raises: BadRequest if the grammar is too complex.
        """
        assert sampling.grammar is not None
        self._matcher = matcher
        self._after = sampling.grammar.after
        self._sampling = sampling
        self._prompt_len = prompt_len
        self._eos_ids = eos_ids
        self._spent_s = 0.0
        """Processor time of this thread for this grammar so far."""
        self._taken = 0
        """Leading generated tokens that have been taken in."""
        self.begun = not self._after
        """Whether the grammar applies from the next token on."""
        self.forced: list[int] = []
        """Tokens that must come next; the matcher has consumed them already."""
        self._mask: bytes | None = None
        """Bit mask of the tokens allowed after the forced ones."""
        self._masks_ahead: list[bytes] = []
        """Bit masks of the tokens allowed after each draft that is not forced (`follow`)."""
        self._ahead_s = 0.0
        """Processor time for drafts so far. It is no part of `_spent_s`: a draft must not make the request fail."""
        self.complete = False
        """Nothing may follow the tokens taken in."""
        if self.begun:
            self._advance()

    def take(self, token_ids: list[int]) -> None:
        """Take in the generated tokens that are new. token_ids: the prompt, then all generated tokens.

        Raises: BadRequest if the grammar does not accept them, or became too complex.
        """
        started_s = time.thread_time()
        for end in range(self._prompt_len + self._taken + 1, len(token_ids) + 1):
            self._taken += 1
            if self.begun:
                self._consume(token_ids[end - 1])
            elif self._taken >= len(self._after) and token_ids[end - len(self._after) : end] == self._after:
                self.begun = True
                self._advance()
        self._spend(started_s)

    def _consume(self, token_id: int) -> None:
        if self.forced:
            allowed = self.forced.pop(0) == token_id
        else:
            allowed = self._matcher.consume_token(token_id)
        if not allowed:
            raise BadRequest(f"the grammar does not allow token {token_id} as number {self._taken} of the answer")
        if not self.forced:
            self._advance()

    def _advance(self) -> None:
        """Find the forced tokens that follow."""
        self._mask = None
        self.complete = self._matcher.is_stopped()
        if not self.complete:
            forced = self._matcher.compute_ff_tokens()
            if forced and self._matcher.consume_tokens(forced):
                self.forced = forced
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(f"the grammar failed: {short_error(self._matcher.get_error())}")

    @property
    def _may_spend_s(self) -> float:
        return _BURST_S + _PER_TOKEN_S * self._taken

    def _spend(self, started_s: float) -> None:
        self._spent_s += time.thread_time() - started_s
        if self._spent_s > self._may_spend_s:
            raise BadRequest(f"the grammar failed: it took {self._spent_s:.2f} s for {self._taken} tokens")

    def prepare(self) -> None:
        """Compute the masks of the next tokens.

        Raises: BadRequest if the grammar became too complex.
        """
        if not self.begun or self._mask is not None:
            return
        started_s = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask())
        self._check()
        self._spend(started_s)
        mask = _without(mask, self._eos_ids)
        if self._is_short:  # some of the client's stop tokens may be text that the grammar allows
            longer = _without(mask, self._sampling.stop_token_ids)
            mask = mask if _is_empty(longer) else longer
        if self._matcher.is_accepting():
            for token_id in self._ends(alone=_is_empty(mask)):
                _set(mask, token_id, allowed=True)
        self._mask = bytes(mask)

    def follow(self, proposed: Iterable[int], limit: int) -> list[int]:
        """At most `limit` drafts, whose masks it prepares: the forced tokens, then `proposed` ones up to the first that the
        grammar forbids; tokens that these force in turn come in place of other proposals. Call `prepare` before."""
        self._masks_ahead = []
        drafts, guesses = self.forced[:limit], list(proposed)
        if not guesses or limit <= len(drafts) or self._ahead_s > self._may_spend_s:
            return drafts
        started_s = time.thread_time()
        try:
            drafts += self._look_ahead(guesses, limit - len(drafts))
        except BadRequest:  # the drafts so far are good
            self._masks_ahead = []
        self._ahead_s += time.thread_time() - started_s
        return drafts

    def _look_ahead(self, guesses: list[int], limit: int) -> list[int]:
        """Drafts after the forced tokens. Raises: BadRequest if the grammar fails on the way."""
        if not self.begun:  # where it may begin, the next row's rules change
            return list(takewhile(lambda token_id: token_id != self._after[-1], guesses))[:limit]
        ahead = copy(self)
        ahead._matcher, ahead._spent_s = self._matcher.deep_copy(), 0.0
        ahead.forced, ahead._taken = [], self._taken + len(self.forced)
        drafts: list[int] = []
        if ahead._matcher.is_stopped():
            return drafts
        while len(drafts) < limit:
            if ahead.forced:
                token_id = ahead.forced[0]
                guesses = guesses[1:] if guesses and guesses[0] == token_id else []
            elif guesses and _allows(ahead._mask, guesses[0]):
                token_id, *guesses = guesses
            else:
                break
            ahead._taken += 1
            ahead._consume(token_id)
            if ahead.complete:  # the answer ends with it, so that no row follows it
                break
            ahead.prepare()
            self._masks_ahead.append(ahead.mask() or b"")
            drafts.append(token_id)
        return drafts

    @property
    def _is_short(self) -> bool:
        """Whether the answer has fewer than `min_tokens` tokens after the forced ones."""
        return self._taken + len(self.forced) < self._sampling.min_tokens

    def _ends(self, *, alone: bool) -> list[int]:
        """The tokens that may end the answer here. alone: no other token is allowed, so that the grammar goes before
        `min_tokens` and `ignore_eos`."""
        if not alone and self._is_short:
            return []
        ends = self._sampling.stop_token_ids
        return self._eos_ids if alone and not ends else ends

    @property
    def banned(self) -> list[int]:
        """The model's end tokens until the grammar begins: an answer that ends before it would not be valid."""
        return [] if self.begun else self._eos_ids

    def mask(self, num_drafts: int = 0) -> bytes | None:
        """A bit mask of the tokens allowed after the first `num_drafts` forced ones (`SampleSpec.mask`); None: all but `banned` are
        allowed, because the grammar has not begun.
        """
        if num_drafts < len(self.forced):
            token_id = self.forced[num_drafts]
            only = bytearray((token_id // 32 + 1) * 4)
            _set(only, token_id, allowed=True)
            return bytes(only)
        if num_drafts > len(self.forced) and self.begun:
            return self._masks_ahead[num_drafts - len(self.forced) - 1]
        return self._mask


def _allows(mask: bytes | None, token_id: int) -> bool:
    return mask is not None and token_id // 8 < len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)


def _is_empty(mask: bytearray) -> bool:
    return not mask.strip(b"\0")


def _without(mask: bytearray, token_ids: list[int]) -> bytearray:
    mask = bytearray(mask)
    for token_id in token_ids:
        _set(mask, token_id, allowed=False)
    return mask


def _set(mask: bytearray, token_id: int, *, allowed: bool) -> None:
    byte, bit = token_id // 8, 1 << token_id % 8
    if byte < len(mask):
        mask[byte] = mask[byte] | bit if allowed else mask[byte] & ~bit

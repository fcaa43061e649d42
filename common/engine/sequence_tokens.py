"""The tokens of a sequence: those that are known, those that it drafts, and those that it may draw. Engine thread; pure.

All of this is a function of the request and of the tokens before a draw, so that every attempt and node agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher

from common.control.identities import pack_ids
from common.control.item_count import SENT_ITEMS
from common.control.messages import WHOLE_VOCABULARY, FinishReason, SamplingParams, items_of
from common.engine.grammar.state import GrammarState
from common.engine.seen_tokens import SeenTokens, TokenCounter, counts_tokens, with_token


class SequenceTokens:
    """Token ids, and what the request's parameters say of the next ones."""

    def __init__(self, ids: list[int], prompt_len: int, sampling: SamplingParams) -> None:
        self.ids = ids
        """The prompt, then all generated tokens, those of earlier attempts included."""
        self.prompt_len = prompt_len
        self.sampling = sampling
        self.draft_ids: list[int] = []
        """Guesses of the next tokens: when the sequence decodes, each adds a row with a draw of its own. `Scheduler.update` accepts
        them up to the first that differs from the token drawn in its place, and clears them."""
        self.num_forced = 0
        """Leading `draft_ids` that its grammar forced."""
        self.grammar: GrammarState | None = None
        """Set by `set_grammar`, for a request with a grammar before its first draw."""
        self.mask: bytes | None = mask_of(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        """A bit mask of the tokens that the request allows at each draw (`SampleSpec.mask`); None: all."""
        self.draw_params = sampling
        """Parameters sent to ranks, without the fields that every draw carries itself."""
        if sampling.allowed_token_ids or sampling.bad_words or sampling.grammar:
            self.draw_params = sampling._replace(allowed_token_ids=pack_ids(), bad_words=[], grammar=None)
        self._longest_bad_word = max(map(len, sampling.bad_words), default=0)
        self.needs_known: bool = self._longest_bad_word > 1 or sampling.grammar is not None
        """Whether a draw depends on the tokens before it beyond what penalties count: none of them can be pending."""
        self._counter: TokenCounter | None = None
        self._counted = 0
        """Leading tokens that `_counter` has counted."""
        self._seen_with_drafts: tuple[tuple[int, int], SeenTokens] | None = None
        """(number of known tokens, number of drafts) and the result of the latest `seen`, to which one more draft can be added."""

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def forced(self) -> Seq[int]:
        """The next tokens, as far as its grammar leaves only these."""
        return () if self.grammar is None else self.grammar.forced

    def seen(self, num_drafts: int = 0) -> SeenTokens | None:
        """The tokens that its penalties count: all that are known, and the first `num_drafts` of `draft_ids`.

        None if it has no penalties, or its grammar leaves one token. Each draft costs a pass over all distinct tokens, if calls
        for more and more drafts follow each other.
        """
        if not counts_tokens(self.sampling) or num_drafts < len(self.forced):
            return None
        latest = self._seen_with_drafts
        if num_drafts and latest is not None and latest[0] == (len(self.ids), num_drafts - 1):
            seen = with_token(latest[1], self.draft_ids[num_drafts - 1])
        else:
            seen = self._seen(num_drafts)
        self._seen_with_drafts = (len(self.ids), num_drafts), seen
        return seen

    def _seen(self, num_drafts: int) -> SeenTokens:
        if self._counter is None:
            self._counter = TokenCounter(self.ids[: self.prompt_len], self.sampling)
            self._counted = self.prompt_len
        self._counter.add(self.ids[self._counted :])
        self._counted = len(self.ids)
        seen = self._counter.seen()
        for token_id in self.draft_ids[:num_drafts]:
            seen = with_token(seen, token_id)
        return seen

    def banned(self, num_drafts: int = 0) -> list[int]:
        """The tokens that its grammar bans, and those that would complete one of its bad words, after all known tokens and the
        first drafts."""
        by_grammar = [] if self.grammar is None else self.grammar.banned
        if not self._longest_bad_word:
            return by_grammar
        start = max(self.prompt_len, len(self.ids) + num_drafts + 1 - self._longest_bad_word)
        known = self.ids[start:] + self.draft_ids[max(0, start - len(self.ids)) : num_drafts]
        return [*by_grammar, *completed_by(self.sampling.bad_words, known)]

    def mask_after(self, num_drafts: int) -> bytes | None:
        """A bit mask of the tokens that can be drawn after the first drafts (`SampleSpec.mask`); None: all."""
        return self.mask if self.grammar is None else both(self.mask, self.grammar.mask(num_drafts))

    @property
    def lacks_grammar(self) -> bool:
        """Whether the request has a grammar that has not been set."""
        return self.grammar is None and self.sampling.grammar is not None

    def set_grammar(self, matcher: LLMatcher, eos_ids: list[int]) -> None:
        """Begin its grammar, and take in the tokens of earlier attempts. matcher: at the grammar's start, not changed.

        Raises: BadRequest if the grammar does not allow those tokens, or is too complex.
        """
        self.grammar = GrammarState(matcher.deep_copy(), self.sampling, self.prompt_len, eos_ids)
        self.advance_grammar()

    def advance_grammar(self) -> None:
        """Take in, if it has a grammar, tokens that were drawn elsewhere. Raises: BadRequest if the grammar forbids them."""
        if self.grammar is not None:
            self.grammar.take(self.ids)
            self.prepare_grammar()

    def prepare_grammar(self) -> None:
        """Make the masks of its next tokens, if it has a grammar. Raises: BadRequest if the grammar became too complex."""
        if self.grammar is None:
            return
        self.grammar.prepare()
        if self.grammar.begun:
            self.draw_params = self.draw_params._replace(min_tokens=0)  # is in the masks

    def max_drafts(self, max_model_len: int) -> int:
        """How many drafts it may have: none after its last token, and its tokens of a step are one message."""
        if self.sampling.logprobs == WHOLE_VOCABULARY:
            return 0
        last = min(self.sampling.max_tokens - self.num_generated, max_model_len - len(self.ids)) - 1
        return max(0, min(last, SENT_ITEMS // items_of(1, self.sampling.logprobs) - 1))

    def draft(self, proposed: Seq[int], limit: int, max_model_len: int) -> None:
        """Draft at most `limit` tokens: those that its grammar forces, then those of `proposed` that the grammar allows, up to
        the first one that would end the answer."""
        limit = max(0, min(limit, self.max_drafts(max_model_len)))
        stops = self.sampling.stop_token_ids
        self.num_forced = min(limit, len(self.forced))
        proposed = list(takewhile(lambda token_id: token_id not in stops, proposed))
        self.draft_ids = proposed[:limit] if self.grammar is None else self.grammar.follow(proposed, limit)

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the sequence ends with its last token, or None if it goes on.

        Raises: BadRequest if its grammar does not allow the token.
        """
        sampling, length = self.sampling, len(self.ids)
        if self.ids[-1] in sampling.stop_token_ids:
            return "stop"
        if self.grammar is not None:
            self.grammar.take(self.ids)
            if self.grammar.complete:
                return "stop"
        if length - self.prompt_len >= sampling.max_tokens or length >= max_model_len:
            return "length"
        return None


def mask_of(token_ids: Iterable[int]) -> bytes:
    """A bit mask that allows only these tokens (`SampleSpec.mask`)."""
    ids = np.array(list(token_ids), np.int64)
    bits = np.zeros((int(ids.max()) // 32 + 1) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32).tobytes()


def both(mask: bytes | None, other: bytes | None) -> bytes | None:
    """The tokens that both masks allow."""
    if mask is None or other is None:
        return other if mask is None else mask
    size = min(len(mask), len(other))
    return (np.frombuffer(mask[:size], np.int32) & np.frombuffer(other[:size], np.int32)).tobytes()


def completed_by(words: Seq[Seq[int]], generated: Seq[int]) -> list[int]:
    """The tokens that would complete one of `words` (token sequences) after the `generated` tokens."""
    size = len(generated)
    return [
        word[-1]
        for word in words
        if len(word) <= size + 1 and list(word[:-1]) == list(generated[size - len(word) + 1 :])
    ]

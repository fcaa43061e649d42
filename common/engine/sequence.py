"""One attempt's sequence as an engine sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llguidance import LLMatcher

from common.base.hashing import BLOCK_SIZE, BlockHash, hash_blocks
from common.control.ids import pack_ids
from common.control.item_count import SENT_ITEMS
from common.control.messages import AttemptKey, EngineRequest, FinishReason, SamplingParams, items_of
from common.engine.grammar.state import GrammarState
from common.engine.seen_tokens import SeenTokens, TokenCounter, counts_tokens, with_token
from common.engine.token_constraints import both, completed_by, mask_of


@dataclass(eq=False)
class Sequence:
    """Token ids, how far their KV is computed, and the blocks that hold it.

    Invariants: KV of tokens [0, num_computed) is in each of `block_tables`, as far as later rows see it; these have room
    for at least `num_scheduled` tokens; `block_hashes` are those of the leading full blocks, as far as computed.
    """

    key: AttemptKey
    request: EngineRequest
    token_ids: list[int]
    """The prompt, then all generated tokens, those of earlier attempts included."""
    root: BlockHash
    arrival_s: float
    block_tables: list[list[int]] = field(default_factory=list[list[int]])
    """[tables][blocks], see `common.engine.kv_allocator`; empty while it holds no blocks."""
    first_blocks: list[int] = field(default_factory=list[int])
    """[tables]: the first entry that it holds; earlier ones are behind the sliding window."""
    num_slots: int = 0
    """Tokens that its blocks have room for."""
    num_computed: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    cached_tokens: int = 0
    """Tokens whose KV it did not compute when it was first admitted: from the prefix cache, or in a block copied from another
    sequence."""
    likely_cached: int = 0
    """Tokens that were in the prefix cache when it was queued."""
    num_published: int = 0
    """Leading blocks that were entered in the prefix cache, as far as it held them."""
    relays: bool = False
    """The sequence's KV is sent to another node while it is computed: it ends here with its first token, and keeps its
    blocks until the transfer has released them (`Scheduler.free`)."""
    first_step_s: float | None = None
    preemptions: int = 0
    group: int = 0
    """Index of its micro-batch, while it runs."""
    in_flight: int = 0
    """Steps that have been scheduled with it and not yet updated."""
    num_scheduled: int = 0
    """The value of `num_computed` when the steps in flight are done."""
    num_pending: int = 0
    """Tokens that steps in flight draw: their number is known, their ids are not."""
    last_draw: tuple[int, int] = (0, 0)
    """(step id, index in its `samples`) of the latest draw for this sequence."""
    draft_ids: list[int] = field(default_factory=list[int])
    """Draft tokens: when it decodes, each adds a row with a draw of its own. `Scheduler.update` clears them. Wrong
    drafts are not rejected: they must equal the tokens that will be drawn, all but the last one."""
    num_scored: int = 0
    """Leading rows of the prompt whose log-probabilities were computed, or are not wanted from this node."""
    over: bool = False
    """It has ended or was aborted, and leaves with the last of its steps in flight."""
    grammar: GrammarState | None = None
    """Set by `set_grammar`, for a request with a grammar before its first draw."""
    adapter_id: int = 0
    """As in `StepInput.adapters`."""
    free_after_steps: bool = False
    """The owner no longer needs the blocks, but a step in flight still writes to them."""
    _counter: TokenCounter | None = None
    _counted: int = 0
    """Leading tokens that `_counter` has counted."""

    def __post_init__(self) -> None:
        sampling = self.sampling = self.request.sampling
        self.prompt_len: int = len(self.request.prompt_ids)
        self.mask: bytes | None = mask_of(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        """The tokens that can be drawn, as `SampleSpec.mask`."""
        self.draw_params: SamplingParams = sampling
        """`sampling` for the ranks, without what each draw has in another form."""
        if sampling.allowed_token_ids or sampling.bad_words or sampling.grammar:
            self.draw_params = sampling._replace(allowed_token_ids=pack_ids(), bad_words=[], grammar=None)
        self._longest_bad_word: int = max(map(len, sampling.bad_words), default=0)
        if sampling.prompt_logprobs is None:
            self.num_scored = self.prompt_len
        self.needs_known_tokens: bool = self._longest_bad_word > 1 or sampling.grammar is not None
        """Whether a draw depends on the tokens before it beyond what penalties count: none can be pending."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_expected(self) -> int:
        """Tokens once its steps in flight are done."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_unscheduled(self) -> int:
        """Tokens, pending ones included, whose KV no scheduled step computes."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed here."""
        return self.num_scored < self.prompt_len - 1

    @property
    def is_decoding(self) -> bool:
        """Only its last token's KV is not scheduled: its next step has that row and those of `draft_ids`."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled == 1

    def full_block_hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks of the present tokens; computes what is not yet known."""
        self.block_hashes = hash_blocks(self.root, self.token_ids, parents=self.block_hashes)
        return self.block_hashes

    def num_usable(self, spare_tokens: int) -> int:
        """Leading tokens whose KV may come from other sequences: `spare_tokens` at the end are computed in any case (the
        logits of the last one are needed), as are rows whose log-probabilities are wanted."""
        usable = self.num_tokens - spare_tokens
        return min(usable, self.num_scored) if self.scores_prompt else usable

    def usable_hashes(self, spare_tokens: int) -> list[BlockHash]:
        """Hashes of the leading blocks that it may take from the prefix cache."""
        return self.full_block_hashes()[: self.num_usable(spare_tokens) // BLOCK_SIZE]

    def seen_tokens(self, num_drafts: int = 0) -> SeenTokens | None:
        """The tokens that its penalties count: all that are known, and the first `num_drafts` of `draft_ids`.

        None if it has no penalties, or its grammar leaves one token. Each draft costs a pass over all distinct tokens.
        """
        if not counts_tokens(self.sampling) or (self.grammar is not None and num_drafts < len(self.grammar.forced)):
            return None
        if self._counter is None:
            self._counter = TokenCounter(self.token_ids[: self.prompt_len], self.sampling)
            self._counted = self.prompt_len
        self._counter.add(self.token_ids[self._counted :])
        self._counted = len(self.token_ids)
        seen = self._counter.seen()
        for token_id in self.draft_ids[:num_drafts]:
            seen = with_token(seen, token_id)
        return seen

    def banned_tokens(self, num_drafts: int = 0) -> list[int]:
        """The tokens that its grammar bans, and those that would complete one of its bad words, after all known tokens and the
        first drafts."""
        by_grammar = [] if self.grammar is None else self.grammar.banned
        if not self._longest_bad_word:
            return by_grammar
        start = max(self.prompt_len, len(self.token_ids) + num_drafts + 1 - self._longest_bad_word)
        known = self.token_ids[start:] + self.draft_ids[max(0, start - len(self.token_ids)) : num_drafts]
        return [*by_grammar, *completed_by(self.sampling.bad_words, known)]

    def set_grammar(self, matcher: LLMatcher, eos_ids: list[int]) -> None:
        """Begin its grammar, and take in the tokens of earlier attempts. matcher: at the grammar's start, not changed.

        Raises: BadRequest as `GrammarState`.
        """
        self.grammar = GrammarState(matcher.deep_copy(), self.sampling, self.prompt_len, eos_ids)
        self.take_tokens()

    def take_tokens(self) -> None:
        """Bring its grammar, if it has one, up to tokens that it did not draw itself. Raises: BadRequest as `GrammarState`."""
        if self.grammar is not None:
            self.grammar.take(self.token_ids)
            self.prepare_grammar()

    def prepare_grammar(self) -> None:
        """Make the masks of its next tokens, if it has a grammar. Raises: BadRequest as `GrammarState`."""
        if self.grammar is None:
            return
        self.grammar.prepare()
        if self.grammar.begun:
            self.draw_params = self.draw_params._replace(min_tokens=0)  # is in the masks

    def draft_forced_tokens(self, limit: int, max_model_len: int) -> None:
        """Draft what its grammar forces next, if it has one: at most `limit` tokens, and none after its last one."""
        if self.grammar is not None and not self.relays:
            last = min(self.sampling.max_tokens - self.num_generated, max_model_len - len(self.token_ids)) - 1
            sent = SENT_ITEMS // items_of(1, self.sampling.logprobs) - 1  # its tokens of a step are one message
            self.draft_ids = self.grammar.forced[: max(0, min(limit, last, sent))]

    def mask_after(self, num_drafts: int) -> bytes | None:
        """The tokens that can be drawn after the first drafts, as `SampleSpec.mask`."""
        return self.mask if self.grammar is None else both(self.mask, self.grammar.mask(num_drafts))

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the sequence ends with its last token, or None if it goes on.

        Raises: BadRequest if its grammar does not allow the token.
        """
        sampling, length = self.sampling, len(self.token_ids)
        if self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        if self.grammar is not None:
            self.grammar.take(self.token_ids)
            if self.grammar.complete:
                return "stop"
        if length - self.prompt_len >= sampling.max_tokens or length >= max_model_len:
            return "length"
        return None

    def ends_in_flight(self, max_model_len: int) -> bool:
        """Whether a token that is being drawn is its last one, whatever it will be."""
        return self.num_pending > 0 and (
            self.relays
            or self.num_generated + self.num_pending >= self.sampling.max_tokens
            or self.num_expected >= max_model_len
        )

    def max_blocks(self, max_model_len: int) -> int:
        """Blocks that it may need in all, if it runs to its end."""
        longest = min(self.prompt_len + self.sampling.max_tokens, max_model_len)
        return -(-max(longest, self.num_tokens) // BLOCK_SIZE)

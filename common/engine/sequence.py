"""One attempt's sequence as an engine sees it: its state, its tokens, the blocks that it holds, and its progress."""

from __future__ import annotations

from collections import deque
from dataclasses import InitVar, dataclass, field

from common.base.hashing import BLOCK_SIZE, BlockHash, hash_blocks
from common.base.transitions import unlisted
from common.control.messages import AttemptKey, EngineRequest
from common.engine.sequence_state import TRANSITIONS, SequenceState
from common.engine.sequence_tokens import SequenceTokens
from common.engine.speculation.sequence_drafts import SequenceDrafts

_STORY_LEN = 16


@dataclass(eq=False, slots=True)
class BlocksHeld:
    """The KV blocks that a sequence holds, in tables of one length: see `common.engine.kv_allocator`."""

    tables: list[list[int]] = field(default_factory=list[list[int]])
    """[tables][blocks]; empty while it holds no blocks."""
    first: list[int] = field(default_factory=list[int])
    """[tables]: the first entry that it holds; earlier ones are behind the sliding window."""
    num_slots: int = 0
    """Tokens that the blocks have room for."""
    num_published: int = 0
    """Leading blocks that were entered in the prefix cache, as far as it held them."""
    home: int = 0
    """The data-parallel rank that holds them."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Hashes of the leading full blocks of its tokens, as far as computed."""


@dataclass(eq=False, slots=True)
class Progress:
    """How far a sequence is computed, and what its steps in flight add."""

    num_computed: int = 0
    """Tokens whose KV is in the blocks."""
    num_scheduled: int = 0
    """The value of `num_computed` when the steps in flight are done."""
    num_pending: int = 0
    """Tokens that steps in flight draw: their number is known, their ids are not."""
    in_flight: int = 0
    """Steps that have been scheduled with it and not yet updated."""
    last_draw: tuple[int, int] = (0, 0)
    """(step id, index in its `samples`) of the latest draw for this sequence."""
    num_scored: int = 0
    """Leading rows of the prompt whose log-probabilities were computed, or are not wanted from this node."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One attempt's sequence.

    Invariants: KV of tokens [0, num_computed) is in each of its block tables, as far as later rows see it; these have room
    for at least `num_scheduled` tokens; only `enter` changes `state`.
    """

    key: AttemptKey
    request: EngineRequest
    token_ids: InitVar[list[int]]
    """The prompt, then the tokens that earlier attempts generated."""
    root: BlockHash
    """Parent hash of its first block."""
    arrival_s: float
    relays: bool = False
    """The KV is sent to another node while it is computed: the sequence ends here with its first token, and keeps its blocks until
    the transfer has released them (`Scheduler.free`)."""
    scored: InitVar[int] = 0
    """`Progress.num_scored` at the start."""
    state: SequenceState = field(default=SequenceState.ACCEPTED, init=False)
    story: deque[tuple[SequenceState, str]] = field(default_factory=lambda: deque(maxlen=_STORY_LEN), init=False)
    """The latest states of the sequence, each with its reason."""
    tokens: SequenceTokens = field(init=False)
    blocks: BlocksHeld = field(default_factory=BlocksHeld, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    adapter_id: int = field(default=0, init=False)
    """Number of its LoRA adapter in the ranks' memory, 0 without one (`StepInput.adapters`)."""
    microbatch: int = field(default=0, init=False)
    """Index of its micro-batch, while it runs."""
    cached_tokens: int = field(default=0, init=False)
    """Tokens whose KV it did not compute when it was first admitted: from the prefix cache, or in a block copied from
    another sequence."""
    likely_cached: int = field(default=0, init=False)
    """Tokens that were in the prefix cache when it was queued."""
    first_step_s: float | None = field(default=None, init=False)
    preemptions: int = field(default=0, init=False)
    drafts: SequenceDrafts | None = field(default=None, init=False)
    """What its drafts are made from, once it decodes on a node that drafts."""

    def __post_init__(self, token_ids: list[int], scored: int) -> None:
        sampling = self.request.sampling
        self.tokens = SequenceTokens(token_ids, len(self.request.prompt_ids), sampling)
        self.progress.num_scored = self.tokens.prompt_len if sampling.prompt_logprobs is None else scored

    def enter(self, state: SequenceState, reason: str) -> None:
        """Change the state. A change that is not in `TRANSITIONS` is a bug: it is reported, and made.

        Raises: InvalidTransition in tests (`common.base.transitions`).
        """
        if state not in TRANSITIONS[self.state]:
            story = [f"{before} ({why})" for before, why in self.story]
            unlisted("sequence", f"{self.state} -> {state}", self.key, [*story, f"{state} ({reason})"])
        self.state = state
        self.story.append((state, reason))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens.ids) - self.progress.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens, pending ones included, whose KV no scheduled step computes."""
        progress = self.progress
        return len(self.tokens.ids) + progress.num_pending - progress.num_scheduled

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed here."""
        return self.progress.num_scored < self.tokens.prompt_len - 1

    @property
    def is_decoding(self) -> bool:
        """Only its last token's KV is not scheduled: its next step has that row and those of its drafts."""
        return self.num_unscheduled == 1

    def full_block_hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks of the present tokens; computes what is not yet known."""
        self.blocks.hashes = hash_blocks(self.root, self.tokens.ids, parents=self.blocks.hashes)
        return self.blocks.hashes

    def num_usable(self, spare_tokens: int) -> int:
        """Leading tokens whose KV may come from other sequences: `spare_tokens` at the end are computed in any case (the
        logits of the last one are needed), as are rows whose log-probabilities are wanted."""
        usable = self.num_tokens - spare_tokens
        return min(usable, self.progress.num_scored) if self.scores_prompt else usable

    def usable_hashes(self, spare_tokens: int) -> list[BlockHash]:
        """Hashes of the leading blocks that it may take from the prefix cache."""
        return self.full_block_hashes()[: self.num_usable(spare_tokens) // BLOCK_SIZE]

    def ends_in_flight(self, max_model_len: int) -> bool:
        """Whether a token that is being drawn is its last one, whatever it will be."""
        tokens, pending = self.tokens, self.progress.num_pending
        return pending > 0 and (
            self.relays
            or tokens.num_generated + pending >= tokens.sampling.max_tokens
            or len(tokens.ids) + pending >= max_model_len
        )

    def max_blocks(self, max_model_len: int) -> int:
        """Blocks that it may need in all, if it runs to its end."""
        longest = min(self.tokens.prompt_len + self.tokens.sampling.max_tokens, max_model_len)
        return -(-max(longest, self.num_tokens) // BLOCK_SIZE)

"""What proposers that run a model share: the guesses of a sequence so far, and what a step costs. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.control.messages import SamplingParams
from common.engine.build_step import draw_of
from common.engine.drafting import Proposer
from common.engine.sequence import Sequence
from common.engine.speculation.step_costs import StepCosts
from common.engine.speculation.token_index import NOTHING, Proposal
from common.engine.step import SampledToken, SampleSpec

ANY_DRAW = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
"""For rows whose draw is not used."""
_PROBE_AFTER = 64
"""Steps after which a sequence that got no drafts waits for its last token, so that drafts can be tried again."""


@dataclass
class Guesses:
    """The guesses of a sequence."""

    seq: Sequence
    limit: int
    ahead: list[int] = field(default_factory=list[int])
    """The guesses so far; they follow the known tokens and those that the grammar forces."""

    def draw(self, index: int, row: int) -> SampleSpec:
        """The draw of the next guess from `row`, as the target would draw it; the sequence is the `index`-th of the step."""
        drafts = len(self.seq.tokens.draft_ids)
        draw = draw_of(self.seq, index, row, self.seq.num_tokens + drafts, num_drafts=drafts)
        return draw._replace(params=draw.params._replace(logprobs=None))

    def take(self, token: SampledToken) -> bool:
        """Add a guess, unless the target may not compute a row after it. Returns whether another one is wanted."""
        if token.error is not None:
            return False
        tokens, before = self.seq.tokens, len(self.ahead)
        forced = tokens.num_forced
        most = forced + self.limit
        tokens.draft([*self.ahead, token.token_id], most, self.seq.num_tokens + most + 1)
        self.ahead = tokens.draft_ids[forced:]
        return before < len(self.ahead) < self.limit


class ModelProposer(Proposer):
    """The part of a proposer that concerns what its steps cost."""

    def __init__(self) -> None:
        self.costs = StepCosts()

    def cost_s(self, num_seqs: int) -> float:
        return self.costs.seconds(num_seqs)

    def foresees(self, seq: Sequence) -> int:
        """1, except for a sequence for which drafts did not pay lately."""
        drafts = seq.drafts
        if drafts is None:
            return 0
        if drafts.skipped:
            drafts.skipped += 1
        return int(not 0 < drafts.skipped <= _PROBE_AFTER)


def proposals(guesses: Seq[Guesses | None]) -> list[Proposal]:
    """The guesses, as a proposer returns them."""
    return [NOTHING if each is None or not each.ahead else Proposal(each.ahead, 1) for each in guesses]

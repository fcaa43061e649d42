"""Chooses the drafts of a step: which sequences guess their next tokens, how many, and whether that pays. Engine thread; pure.

A draft costs a row and is accepted with a measured probability. Rows are added, the likeliest first, as long as the expected
tokens per second rise. Tokens that a grammar forces are drafts too, in front of the others, with or without a proposer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.control.messages import AttemptKey
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.speculation.acceptance import Acceptance
from common.engine.speculation.recent_answers import RecentAnswers
from common.engine.speculation.sequence_drafts import SequenceDrafts
from common.engine.speculation.step_costs import StepCosts
from common.engine.speculation.token_index import MAX_MATCH, NOTHING, Proposal, TokenIndex

_TAKEN_AT_ONCE = 4096
"""Tokens that an index takes in for one step, so that a long prompt does not delay the others: about 2 ms."""
_PROBE_AFTER, _PROBE = 64, 2
"""When `_PROBE_AFTER` proposals in a row did not seem to pay, `_PROBE` drafts are computed, to learn whether that still holds."""
_LEAST_GAIN = 1.02
_LEAST_CHANCE = 0.02
"""Drafts that are less likely right than this are not considered."""
_WAIT_FROM = 0.5
"""Chance of the first draft from which a sequence waits for its last token."""
_SUFFIX_CANDIDATES = 32
"""Places that a suffix index compares; the n-gram index takes the latest one."""


@dataclass
class DraftCounts:
    """Counters since the node's start."""

    drafted: int = 0
    accepted: int = 0


class Proposer(ABC):
    """Proposes tokens."""

    name: str
    spent_s = 0.0
    """Seconds that the latest `propose` took, if that is to be counted."""

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        """Guess the tokens after the known ones and after those that the grammar forces: for sequence i at most `limits[i]`."""

    @abstractmethod
    def foresees(self, seq: Sequence) -> int:
        """Predict `Proposal.match` of the proposal for when the sequence's last token is known; 0 if there will be none."""

    def ended(self, seq: Sequence) -> None:  # noqa: B027 - most have nothing to do
        """Learn from the answer of a sequence that has ended, or free what is kept for it."""

    def cost_s(self, num_seqs: int) -> float:
        """Seconds of proposing one more token for each of `num_seqs` sequences. If it is 0, `propose` may be asked for more tokens
        than are used; else only for as many as should save time, and it leaves the proposals in `draft_ids` of the sequences."""
        return 0.0


class IndexProposer(Proposer):
    """Proposes what followed the same tokens earlier in the sequence, in the prediction that its client sent, or in recent
    answers of its tenant."""

    def __init__(self, name: str, max_answer_tokens: int = 0) -> None:
        """name: `suffix` or `ngram`. `max_answer_tokens`: of recent answers that are kept, 0 for none."""
        self.name = name
        self._max_candidates = 1 if name == "ngram" else _SUFFIX_CANDIDATES
        self._answers = RecentAnswers(max_answer_tokens, self._max_candidates)

    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        return [self._propose(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def _propose(self, seq: Sequence, limit: int) -> Proposal:
        drafts = seq.drafts
        assert drafts is not None
        if drafts.index is None:
            prediction = seq.request.prediction
            drafts.index = TokenIndex([prediction] if prediction else (), max_candidates=self._max_candidates)
        if not drafts.index.take(seq.tokens.ids, _TAKEN_AT_ONCE):
            return NOTHING
        forced = seq.tokens.forced
        own = drafts.index.propose(forced, limit)
        if not len(self._answers):
            return own
        tail = [*seq.tokens.ids[-MAX_MATCH:], *forced]
        earlier = self._answers.find(seq.request.tenant, tail, limit, above=own.match)
        return earlier if earlier.token_ids else own

    def foresees(self, seq: Sequence) -> int:
        proposal = NOTHING if seq.drafts is None else self._propose(seq, 2)
        return proposal.match if len(proposal.token_ids) > 1 else 0

    def ended(self, seq: Sequence) -> None:
        self._answers.add(seq.request.tenant, seq.tokens.ids[seq.tokens.prompt_len :])


class Drafting:
    """The drafts of one node's sequences."""

    def __init__(self, proposer: Proposer | None = None, max_drafts: int = 0, *, always: bool = False) -> None:
        """`max_drafts`: of one sequence in one step, those of its grammar aside. `always`: draft whether it pays or not."""
        self.acceptance = Acceptance()
        self.costs = StepCosts()
        self.counts: dict[str, DraftCounts] = {}
        """By method: the proposer's name, and `grammar`."""
        self.saved_s = 0.0
        """Estimated seconds of decode steps that accepted drafts saved, less what the rejected ones took."""
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._always = always

    def draft(self, seqs: list[Sequence], num_running: int, config: SchedulerConfig) -> list[Sequence]:
        """Set `draft_ids` of the sequences that can decode in the next step. Returns those that should: with asynchronous
        scheduling some wait for their last token instead.

        `num_running`: sequences that must find a row in any case.
        """
        if config.depth > 1:
            seqs = self._without_waiting(seqs)
        proposer, max_model_len = self._proposer, config.max_model_len
        max_rows = min(config.max_num_batched_tokens - num_running, config.prefill_chunk)  # drafts in all
        for seq in seqs:
            if (seq.tokens.grammar is not None or proposer is not None) and not seq.relays:
                seq.tokens.draft((), max_rows, max_model_len)
                max_rows -= len(seq.tokens.draft_ids)
        if proposer is None or max_rows <= 0:
            return seqs
        rows = sum(1 + len(seq.tokens.draft_ids) for seq in seqs)
        if not (self._always or self._may_pay(len(seqs), rows, max_rows)):
            return seqs
        asked = [seq for seq in seqs if not (seq.relays or seq.progress.num_pending)]
        limits: list[int] = []
        for seq in asked:
            self._drafts_of(seq)
            left = seq.tokens.max_drafts(max_model_len) - len(seq.tokens.draft_ids)
            limits.append(max(0, min(left, self._max_drafts, max_rows)))
        if self._costs_s(1) > 0:
            limits = self._counts(asked, [Proposal([0] * n, 1) for n in limits], rows, max_rows)
            if any(limits):
                for seq, proposal in zip(asked, proposer.propose(asked, limits), strict=True):
                    self._drafts_of(seq).match = proposal.match
                self.saved_s -= proposer.spent_s
            return seqs
        proposals = proposer.propose(asked, limits)
        for seq, proposal, count in zip(asked, proposals, self._counts(asked, proposals, rows, max_rows), strict=True):
            if count:
                forced = len(seq.tokens.draft_ids)
                seq.tokens.draft(proposal.token_ids[:count], forced + count, max_model_len)
                self._drafts_of(seq).match = proposal.match
        return seqs

    def _costs_s(self, num_seqs: int) -> float:
        return 0.0 if self._proposer is None or not num_seqs else self._proposer.cost_s(num_seqs)

    def _may_pay(self, num_seqs: int, rows: int, max_rows: int) -> bool:
        """Whether drafts would pay if all were accepted."""
        if not num_seqs or (self._costs_s(1) > 0 and not self.costs.is_measured):
            return False
        numbers = range(min(max_rows, num_seqs * self._max_drafts))
        return self._best([(1.0, -(number // num_seqs)) for number in numbers], rows) > 0

    def _counts(self, seqs: Seq[Sequence], proposals: Seq[Proposal], rows: int, max_rows: int) -> list[int]:
        """How many tokens of each proposal to compute."""
        if self._always:
            return _within([len(each.token_ids) for each in proposals], max_rows)
        ranked: list[tuple[float, int, int]] = []
        for index, (seq, proposal) in enumerate(zip(seqs, proposals, strict=True)):
            chance, acceptance = 1.0, self._drafts_of(seq).acceptance
            for number in range(len(proposal.token_ids)):
                chance *= acceptance.chance(proposal.match + number)
                if chance < _LEAST_CHANCE:
                    break
                ranked.append((chance, -number, index))
        ranked.sort(reverse=True)
        del ranked[max_rows:]
        counts = [0] * len(seqs)
        for _, _, index in ranked[: self._best([(chance, number) for chance, number, _ in ranked], rows)]:
            counts[index] += 1
        for index, (seq, proposal) in enumerate(zip(seqs, proposals, strict=True)):
            drafts = self._drafts_of(seq)
            drafts.skipped = 0 if counts[index] else drafts.skipped + bool(proposal.token_ids)
            if drafts.skipped > _PROBE_AFTER:
                counts[index], drafts.skipped = min(_PROBE, len(proposal.token_ids)), 0
        return _within(counts, max_rows)

    def _best(self, drafts: Seq[tuple[float, int]], rows: int) -> int:
        """How many of the drafts, the likeliest first, give most tokens per second beside `rows` rows. Each has its chance, and
        minus its number among those of its sequence."""
        tokens, seconds, proposing_s = float(rows), self.costs.seconds(rows), 0.0
        best, most = 0, tokens / seconds * _LEAST_GAIN
        proposed = [0] * self._max_drafts
        is_free = self._costs_s(1) == 0.0
        for count, (chance, number) in enumerate(drafts, 1):
            tokens += chance
            seconds = max(seconds, self.costs.seconds(rows + count))
            if not is_free:  # one more sequence in the proposer's step of this number
                before = proposed[-number]
                proposed[-number] += 1
                proposing_s += self._costs_s(before + 1) - self._costs_s(before)
            if tokens / (seconds + proposing_s) > most:
                best, most = count, tokens / (seconds + proposing_s)
        return best

    def _without_waiting(self, seqs: list[Sequence]) -> list[Sequence]:
        """Without those that wait for their last tokens, which steps in flight draw. Where drafts seem to pay they wait, and all
        wait if half of them do: two smaller steps would take twice the time of one."""
        proposer = self._proposer
        if proposer is None:
            return seqs
        pending = [seq for seq in seqs if seq.progress.num_pending]
        waiting: set[AttemptKey] = set()
        for seq in pending:
            acceptance, match = self._drafts_of(seq).acceptance, proposer.foresees(seq)
            if match > 0 and (self._always or acceptance.chance(match) >= _WAIT_FROM):
                waiting.add(seq.key)
        if 2 * len(waiting) >= len(pending):
            waiting = {seq.key for seq in pending}
        return [seq for seq in seqs if seq.key not in waiting]

    def _drafts_of(self, seq: Sequence) -> SequenceDrafts:
        if seq.drafts is None:
            seq.drafts = SequenceDrafts(Acceptance(self.acceptance))
        return seq.drafts

    def verified(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A step accepted the first ones of a sequence's drafts."""
        forced = min(drafted, seq.tokens.num_forced)
        if forced:
            self._count("grammar", forced, min(accepted, forced))
        if drafted > forced and seq.drafts is not None and self._proposer is not None:
            proposed, right = drafted - forced, max(0, accepted - forced)
            seq.drafts.acceptance.learn(seq.drafts.match, proposed, right)
            self._count(self._proposer.name, proposed, right)

    def _count(self, method: str, drafted: int, accepted: int) -> None:
        counts = self.counts.setdefault(method, DraftCounts())
        counts.drafted += drafted
        counts.accepted += accepted

    def ended(self, seq: Sequence) -> None:
        """A sequence of this node ends, with all its tokens or with the first ones."""
        if self._proposer is not None and not seq.relays and len(seq.tokens.ids) > seq.tokens.prompt_len:
            self._proposer.ended(seq)

    def timed(self, num_seqs: int, rows: int, tokens: int, seconds: float) -> None:
        """A step without prompts took this long and gave `tokens` tokens."""
        if self._proposer is None:
            return
        self.costs.record(rows, seconds)
        if rows > num_seqs:
            plain_s = min(self.costs.seconds(num_seqs), seconds)
            self.saved_s += plain_s * tokens / num_seqs - seconds


def _within(counts: list[int], limit: int) -> list[int]:
    """`counts` with later ones reduced until the sum is at most `limit`."""
    out: list[int] = []
    for count in counts:
        out.append(min(count, limit))
        limit -= out[-1]
    return out

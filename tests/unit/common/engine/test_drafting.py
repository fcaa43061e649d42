"""How many drafts a step gets: by what they cost and how often they were right."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.drafting import Drafting, IndexProposer, Proposer
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.speculation.acceptance import Acceptance
from common.engine.speculation.step_costs import StepCosts
from common.engine.speculation.token_index import Proposal

TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18]


def sequence(name: str = "a", prompt: list[int] | None = None, tenant: str = "", **params: object) -> Sequence:
    ids = prompt or [*TEXT, 1, *TEXT[:3]]
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 50, **params})  # type: ignore[arg-type]
    return Sequence(
        AttemptKey(name, 1), EngineRequest(pack_ids(ids), sampling, tenant=tenant), list(ids), root_hash("f"), 0.0
    )


def drafting(cost_of_row: float, max_drafts: int = 8) -> Drafting:
    """Of a node whose step of one row takes a second, and where most drafts were right."""
    made = Drafting(IndexProposer("suffix"), max_drafts)
    for rows in range(1, 65):
        made.costs.record(rows, 1.0 + cost_of_row * (rows - 1))
        for match in (2, 4, 8, 16):
            made.acceptance.learn(match, 1, 1)
    return made


def drafts_of(made: Drafting, seqs: list[Sequence], max_rows: int = 64) -> list[int]:
    made.draft(seqs, 0, SchedulerConfig(1000, 64, max_rows, max_rows))
    return [len(seq.tokens.draft_ids) for seq in seqs]


def test_drafts_are_what_followed_the_same_tokens_before() -> None:
    seq = sequence()
    assert drafts_of(drafting(0.01), [seq]) == [8]
    assert seq.tokens.draft_ids == [*TEXT[3:], 1, 10]


def test_the_dearer_a_row_the_fewer_drafts() -> None:
    numbers = [drafts_of(drafting(cost), [sequence()])[0] for cost in (0.01, 0.1, 0.3, 1.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0], numbers[-1]) == (8, 0)


def test_a_large_batch_gets_none() -> None:
    """Its rows cost what they bring; nothing is even proposed."""
    seqs = [sequence(str(n)) for n in range(16)]
    assert sum(drafts_of(drafting(1.0), seqs)) == 0
    assert all(seq.drafts is None for seq in seqs)


def test_a_sequence_whose_drafts_fail_gets_none_and_is_tried_again() -> None:
    made, failing = drafting(0.3), sequence("a")
    assert drafts_of(made, [failing])[0] > 2
    for _ in range(40):
        made.verified(failing, 4, 0)
    numbers = [drafts_of(made, [failing])[0] for _ in range(70)]
    assert numbers[0] == 0
    assert 1 <= sum(numbers) <= 2, "one probe"
    for _ in range(40):
        made.verified(failing, 4, 4)
    assert drafts_of(made, [failing])[0] > 2, "what was learnt before is forgotten"


def test_there_are_never_more_rows_than_allowed_nor_drafts_after_the_last_token() -> None:
    made = drafting(0.0)
    assert sum(drafts_of(made, [sequence(str(n)) for n in range(5)], max_rows=9)) == 9
    assert drafts_of(made, [sequence(max_tokens=3)]) == [2]
    assert drafts_of(made, [sequence(max_tokens=1)]) == [0]
    assert drafts_of(made, [sequence(stop_token_ids=[15])]) == [2], "none from a token on that ends the answer"
    assert made.draft([sequence()], 70, SchedulerConfig(1000, 80, 64, 64)), "more sequences than rows"
    relayed = sequence()
    relayed.relays = True
    assert drafts_of(made, [relayed]) == [0]


def test_a_prediction_is_drafted_from() -> None:
    seq = sequence(prompt=[3, 10, 11])
    seq.request = seq.request._replace(prediction=pack_ids(TEXT))
    drafts_of(drafting(0.01), [seq])
    assert seq.tokens.draft_ids == TEXT[2:]


def test_sequences_wait_for_their_last_token_where_drafts_seem_right() -> None:
    made, config = drafting(0.0), SchedulerConfig(1000, 64, 64, 64, depth=2)
    repeating, other = sequence("a"), [sequence(str(n), [n, 1, 2, 3]) for n in range(20, 23)]
    for seq in [repeating, *other]:
        seq.progress.num_pending = 1
    assert made.draft([repeating, *other], 0, config) == other
    assert made.draft([repeating, other[0]], 0, config) == [], "two small steps would take longer than one"
    repeating.progress.num_pending = 0
    assert made.draft([repeating, *other], 0, config) == [repeating, *other]
    assert len(repeating.tokens.draft_ids) == 8


def test_chances_differ_by_match_and_begin_with_those_of_the_node() -> None:
    node = Acceptance()
    one, other = Acceptance(node), Acceptance(node)
    for _ in range(100):
        one.learn(2, 3, 0)
        one.learn(16, 3, 3)
    assert one.chance(2) < 0.1
    assert one.chance(20) > 0.9
    assert other.chance(2) == pytest.approx(node.chance(2))
    assert one.chance(8) == pytest.approx(other.chance(8), abs=0.05), "nothing was learnt of these"


def test_costs_between_measured_sizes_are_interpolated_and_never_fall() -> None:
    costs = StepCosts()
    assert costs.seconds(4) > costs.seconds(1)
    costs.record(1, 1.0)
    costs.record(9, 0.5)
    assert costs.seconds(5) == costs.seconds(1) == 1.0
    costs.record(17, 2.0)
    assert costs.seconds(13) == pytest.approx(1.25)
    for _ in range(100):
        costs.record(17, 1.0)
    costs.record(17, 100.0)
    assert costs.seconds(17) < 1.5, "one step that was disturbed"


def test_an_answer_drafts_for_later_sequences_of_its_tenant_only() -> None:
    made = Drafting(IndexProposer("suffix", max_answer_tokens=1000), 8, always=True)
    answered = sequence("a", [1, 2, 3], tenant="x")
    answered.tokens.ids += TEXT
    made.ended(answered)
    same, other = (sequence(name, [5, 6, *TEXT[:3]], tenant=name) for name in ("x", "y"))
    assert drafts_of(made, [same, other]) == [6, 0]
    assert same.tokens.draft_ids == TEXT[3:]
    repeating = sequence("b", [*TEXT[:3], 20, 21, 22, *TEXT[:3]], tenant="x")
    drafts_of(made, [repeating])
    assert repeating.tokens.draft_ids[:3] == [20, 21, 22], "its own text goes first where it matches as well"


def test_without_room_for_answers_none_is_kept() -> None:
    made = Drafting(IndexProposer("suffix"), 8, always=True)
    answered = sequence("a", [1, 2, 3])
    answered.tokens.ids += TEXT
    made.ended(answered)
    assert drafts_of(made, [sequence("b", [5, 6, *TEXT[:3]])]) == [0]


class Costly(Proposer):
    """A proposer whose guesses take `cost_of_guess` seconds for each number of them."""

    name = "draft"

    def __init__(self, cost_of_guess: float) -> None:
        self.cost_of_guess = cost_of_guess
        self.limits: list[int] = []

    def propose(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[Proposal]:
        self.limits = list(limits)
        for seq, limit in zip(seqs, limits, strict=True):
            seq.tokens.draft([7] * limit, limit, 1000)
        self.spent_s = self.cost_of_guess * max(limits)
        return [Proposal([7] * limit, 1) for limit in limits]

    def foresees(self, seq: Sequence) -> int:
        return 1

    def cost_s(self, num_seqs: int) -> float:
        return self.cost_of_guess * (num_seqs > 0)


def costly(cost_of_guess: float, *, measured: bool = True) -> tuple[Drafting, Costly]:
    proposer = Costly(cost_of_guess)
    made = Drafting(proposer, 8)
    for rows in range(1, 65 if measured else 1):
        made.costs.record(rows, 1.0)
    for _ in range(200):
        made.acceptance.learn(1, 8, 6)
    return made, proposer


def test_the_dearer_a_guess_the_fewer_are_asked_for() -> None:
    numbers: list[int] = []
    for cost in (0.001, 0.2, 0.5, 3.0):
        made, proposer = costly(cost)
        numbers += drafts_of(made, [sequence()])
        assert proposer.limits == ([numbers[-1]] if numbers[-1] else [])
        assert made.saved_s == pytest.approx(-cost * numbers[-1]), "what guesses took is counted"
    assert numbers == sorted(numbers, reverse=True)
    assert (numbers[0] > 5, numbers[-1]) == (True, 0)
    made, _ = costly(0.5)
    more = drafts_of(made, [sequence(str(n)) for n in range(4)])
    assert max(more) >= numbers[2], "several sequences share the time of a guess"


def test_costly_guesses_begin_when_steps_are_measured() -> None:
    made, proposer = costly(0.001, measured=False)
    assert drafts_of(made, [sequence()]) == [0]
    assert proposer.limits == []

"""Learned costs: synthetic nodes of known speed."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from router.policy import POLICIES, Fleet, Memory, Query, Routing, kv_aware, place
from router.policy.costs import CostModel, Line


def observe(model: CostModel, incarnation: str, rng: random.Random, *, slow: float = 1.0, count: int = 300) -> None:
    for _ in range(count):
        tokens, context = rng.randrange(16, 4000), rng.choice([0, 0, 2000, 8000])
        seconds = slow * (0.01 + 1e-4 * tokens + 2e-8 * tokens * (context + tokens / 2))
        model.prefilled(incarnation, tokens, context, seconds * rng.uniform(0.9, 1.1))


def prefill_s(model: CostModel, incarnation: str, tokens: int, context: int = 0) -> float:
    return model.factors(incarnation)[0] * kv_aware.compute_s(model.costs, tokens, Query(context + tokens))


def test_coefficients_are_found_whatever_the_prior_said() -> None:
    model = CostModel()
    observe(model, "a", random.Random(0))
    for tokens, context in ((100, 0), (3000, 0), (1000, 8000)):
        truth = 0.01 + 1e-4 * tokens + 2e-8 * tokens * (context + tokens / 2)
        assert prefill_s(model, "a", tokens, context) == pytest.approx(truth, rel=0.1)


def test_a_node_nobody_has_measured_costs_what_the_fleet_costs() -> None:
    model = CostModel()
    observe(model, "a", random.Random(0))
    assert model.factors("new") == (1.0, 1.0, 1.0)
    assert prefill_s(model, "new", 1000) == pytest.approx(prefill_s(model, "a", 1000), rel=0.1)


def test_a_slow_node_is_known_by_its_factor_and_a_restart_forgets_it() -> None:
    model, rng = CostModel(), random.Random(1)
    for _ in range(60):
        observe(model, "fast", rng, count=3)
        observe(model, "slow", rng, slow=4.0, count=1)
    assert prefill_s(model, "slow", 2000) / prefill_s(model, "fast", 2000) == pytest.approx(4.0, rel=0.2)
    model.drop("slow")
    assert model.factors("slow")[0] == 1.0


def test_one_stall_of_a_minute_moves_nothing_far() -> None:
    model = CostModel()
    observe(model, "a", random.Random(0))
    before = prefill_s(model, "a", 1000)
    model.prefilled("a", 500, 0, 60.0)
    assert prefill_s(model, "a", 1000) < before * 1.3


def test_a_change_of_speed_is_followed() -> None:
    model, rng = CostModel(), random.Random(2)
    observe(model, "a", rng)
    before = prefill_s(model, "a", 1000)
    observe(model, "a", rng, slow=3.0, count=60)
    assert prefill_s(model, "a", 1000) == pytest.approx(3 * before, rel=0.25)


def test_transfers_steps_and_answers_are_learned() -> None:
    model, rng = CostModel(), random.Random(3)
    for _ in range(200):
        size, running = rng.randrange(10**6, 10**9), rng.randrange(1, 64)
        model.relayed("d", size, 0.002 + size / 5e9)
        model.stepped("d", running, 0.01 + 0.001 * running)
        model.answered(40)
        model.computed(500, 0.1)
    costs, (_, link_slowness, step_slowness) = model.costs, model.factors("d")
    assert link_slowness * (costs.transfer_base_s + 5e8 * costs.transfer_byte_s) == pytest.approx(0.102, rel=0.05)
    assert step_slowness * (costs.step_base_s + 32 * costs.step_seq_s) == pytest.approx(0.042, rel=0.05)
    assert costs.output_tokens == pytest.approx(40, rel=0.1)
    assert costs.queued_token_s == pytest.approx(2e-4)


def test_nonsense_teaches_nothing() -> None:
    model = CostModel()
    before = replace(model.costs)
    model.prefilled("a", 0, 10, 1.0)
    model.prefilled("a", 10, 0, 0.0)
    model.relayed("a", 0, 1.0)
    model.stepped("a", 0, 1.0)
    model.computed(-5, 1.0)
    assert model.costs == before


def test_a_line_never_expects_less_than_nothing() -> None:
    line, rng = Line((1.0, 1.0), (1.0, 1.0)), random.Random(0)
    for _ in range(100):
        x = rng.uniform(1, 10)
        line.learn((1.0, x), max(0.01, 5 - x))  # falls: no non-negative slope fits
    assert min(line.values) >= 0
    assert line.at((1.0, 50.0)) > 0


def test_two_nodes_of_different_speed_get_work_in_proportion() -> None:
    """A closed loop in virtual time: the slow node is three times slower and serves about a third as much."""
    rng, model, memory = random.Random(0), CostModel(), Memory(random.Random(0))
    prefill, decode = Fleet("prefill"), Fleet("decode")
    for name in ("fast", "slow"):
        prefill.add(name, name)
    decode.add("d", "d", running=1e6)
    speed = {"fast": 1e-3, "slow": 3e-3}
    free_s, served, ends = {"fast": 0.0, "slow": 0.0}, Counter[str](), list[tuple[float, str, int, float]]()
    now_s = 0.0
    for _ in range(1000):
        now_s += rng.expovariate(1 / 0.4)
        for end in sorted(end for end in ends if end[0] <= now_s):
            ends.remove(end)
            _, name, tokens, took_s = end
            prefill.over(name, tokens=tokens, blocks=0, reported=False)
            model.prefilled(name, tokens, 0, took_s)
            model.computed(tokens, took_s)
            prefill.costs = model.costs
            prefill.update(name, slowness=model.factors(name)[0])
        tokens = rng.randrange(300, 700)
        decision = place(Query(tokens), prefill, decode, Routing(POLICIES["kv_aware"], 0, memory))
        assert decision.prefill is not None
        picked = decision.prefill
        took_s = tokens * speed[picked.node_id]
        free_s[picked.node_id] = max(now_s, free_s[picked.node_id]) + took_s
        ends.append((free_s[picked.node_id], picked.node_id, tokens, took_s))
        prefill.sent(picked.node_id, tokens=tokens, blocks=0, work_s=picked.work_s)
        served[picked.node_id] += 1
    assert served["fast"] / served["slow"] == pytest.approx(3, rel=0.2), served


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_teaches_nothing(seconds: float) -> None:
    model = CostModel()
    before = replace(model.costs)
    model.prefilled("a", 100, 0, seconds)
    model.relayed("a", 10**6, seconds)
    model.stepped("a", 4, seconds)
    model.computed(100, seconds)
    assert model.costs == before
    assert model.factors("a") == (1.0, 1.0, 1.0)

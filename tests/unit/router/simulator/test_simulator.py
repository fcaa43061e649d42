"""The simulator against formulas and against a replay that shares no code with it."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.base.errors import ConfigError
from router.requests.admission import Objectives
from router.simulator import cli
from router.simulator import run as run_module
from router.simulator.cluster import SimulatedCluster
from router.simulator.events import Events
from router.simulator.hardware import Hardware, Shape
from router.simulator.report import Ledger
from router.simulator.request import SimRequest
from router.simulator.run import Simulation, SimulationOutcome, highest_rate, simulate
from router.simulator.simulated_router import Admission, SimulatedRouter
from router.simulator.traces import TraceLine, read_trace
from router.simulator.workload import block_name, from_trace, joined


def run(
    shape: Shape, requests: list[SimRequest], policy: str = "round_robin", local: int = 0
) -> tuple[Ledger, SimulatedCluster]:
    events = Events()
    router = SimulatedRouter(shape, events, policy=policy, local_prefill_tokens=local)
    cluster = SimulatedCluster(shape, router, events)
    ledger = cluster.run(iter(requests))
    for node in [*cluster.nodes["prefill"], *cluster.nodes["decode"]]:
        node.cache.check_integrity()
        load = node.load()
        assert load.waiting == load.running == load.queued_tokens == 0, node.node_id
        assert node.cache.room == node.cache.capacity, "blocks are still in use"
    return ledger, cluster


def request(number: int, arrival_s: float, ids: list[int], output: int = 10, block_tokens: int = 512) -> SimRequest:
    names = [block_name(0, i) for i in ids]
    return SimRequest(number, arrival_s, len(ids) * block_tokens, output, names)


def random_trace(count: int, gap_s: float, seed: int = 1) -> list[TraceLine]:
    """Prompts that share prefixes of a tree."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[]]
    lines, fresh = [], 0
    for number in range(count):
        prefix = rng.choice(prompts[-40:])[: rng.randrange(12)]
        new = rng.randrange(1, 5)
        ids = prefix + list(range(fresh, fresh + new))
        fresh += new
        prompts.append(ids)
        lines.append(TraceLine(number * gap_s, len(ids) * 512 - rng.randrange(512), rng.randrange(1, 40), ids))
    return lines


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "random"])
@pytest.mark.parametrize("local", [0, 3000])
def test_every_request_ends_and_every_block_comes_back(policy: str, local: int) -> None:
    shape = Shape(prefill=3, decode=2, cache_blocks=60, decode_blocks=100, hardware=Hardware(max_num_seqs=4))
    requests = list(from_trace(random_trace(600, 0.05), requests=1500))
    ledger, _ = run(shape, requests, policy, local)
    assert ledger.arrived_count == len(ledger.ttft_s) + ledger.refusals.total() == 1500
    assert not ledger.refusals
    assert (ledger.local > 0) == (local > 0)
    assert min(ledger.ttft_s) > 0
    assert min(ledger.tpot_s) >= 0


def test_a_request_that_no_cache_can_hold_is_refused() -> None:
    ledger, _ = run(Shape(1, 1, cache_blocks=4), [request(0, 0, list(range(5))), request(1, 0, [1, 2])])
    assert ledger.refusals == {"longer than a node's cache": 1}
    assert len(ledger.ttft_s) == 1


def test_rates_of_a_run_in_which_nothing_was_served_are_those_of_its_arrivals() -> None:
    lines = [TraceLine(float(number), 1000, 1, [1, 2]) for number in range(11)]
    shape = Shape(1, 1, cache_blocks=1, decode_blocks=1)
    figures = simulate(Simulation(trace=lines, shape=shape)).figures
    assert sum(figures["refused"].values()) == 11
    assert (figures["request_rate"], figures["good_rate"]) == (pytest.approx(1.1), 0.0)


def test_without_prefill_nodes_decode_nodes_compute_the_prompts() -> None:
    ledger, _ = run(Shape(0, 2), [request(i, 0.1 * i, [i, i + 1000]) for i in range(50)])
    assert ledger.local == len(ledger.ttft_s) == 50


def test_equal_seeds_give_equal_runs_and_other_seeds_others() -> None:
    base = Simulation(policy="random", requests=800, shape=Shape(3, 3))
    first, again, other = (simulate(replace(base, seed=seed)) for seed in (5, 5, 6))
    assert first.figures == again.figures
    assert first.ledger.ttft_s == again.ledger.ttft_s
    assert first.ledger.ttft_s != other.ledger.ttft_s


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_a_lone_prefill_node_waits_as_the_formula_of_a_queue_with_constant_service_says(load: float) -> None:
    hardware = Hardware()
    service_s = hardware.prefill_s(1024, 0)
    rng, now_s, requests, count = random.Random(7), 0.0, [], 6000
    for i in range(count):
        now_s += rng.expovariate(load / service_s)
        requests.append(request(i, now_s, [2 * i, 2 * i + 1], output=1))
    ledger, _ = run(Shape(1, 1, hardware=hardware), requests)
    expected_s = service_s * (1 + load / (2 * (1 - load)))
    assert sum(ledger.ttft_s) / count == pytest.approx(expected_s, rel=0.06)
    assert ledger.prefill_busy_s == [pytest.approx(count * service_s)]


def test_round_robin_hits_as_a_replay_of_plain_lru_caches_does() -> None:
    """At a rate at which no two requests overlap, so that the order of use is the order of arrival."""
    lines, nodes, capacity = random_trace(2000, 60.0), 3, 40
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(nodes)]
    blocks = hits = 0
    # `round_robin` may begin anywhere: only who shares a cache with whom matters.
    for turn, line in enumerate(lines):
        cache, leading = caches[turn % nodes], True
        for block in line.hash_ids:
            leading = leading and block in cache
            hits += leading
        blocks += len(line.hash_ids)
        for block in reversed(line.hash_ids):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    ledger, _ = run(Shape(nodes, 2, cache_blocks=capacity), list(from_trace(lines)))
    assert 0.05 < hits / blocks < 0.95
    assert (ledger.hit_blocks, ledger.blocks) == (hits, blocks)


def test_steps_of_a_constant_batch_take_what_their_sum_says() -> None:
    hardware = Hardware(step_token_s=1e-6, prefill_fixed_s=0.0, link_latency_s=0.0)
    output, sequences = 101, 5
    same_time = [request(i, 0.0, [10 * i, 10 * i + 1], output=output) for i in range(sequences)]
    # A prefill node each: all join at one moment.
    ledger, _ = run(Shape(sequences, 1, hardware=hardware), same_time)
    steps = output - 1
    whole_s = sum(
        hardware.step_fixed_s
        + hardware.step_seq_s * sequences
        + hardware.step_token_s * sequences * (1024 + 1 + step + 0.5)  # a continuous step is as long as its middle
        for step in range(steps)
    )
    for tpot_s in ledger.tpot_s:
        joined_later_s = ledger.sent_bytes / sequences / hardware.link_bytes_s * hardware.tail
        assert tpot_s * steps == pytest.approx(whole_s + joined_later_s, rel=1e-6)


def test_a_relay_overlaps_its_prefill_but_for_one_layer() -> None:
    fast = Hardware(link_latency_s=0.0)
    [lone] = [request(0, 0.0, [1, 2, 3, 4], output=2)]
    ledger, _ = run(Shape(1, 1, hardware=fast), [lone])
    tail_s = fast.transfer_s(4 * 512 * fast.kv_token_bytes) / fast.layers
    assert lone.first_token_s == pytest.approx(fast.prefill_s(2048, 0))
    assert lone.finished_s - lone.first_token_s == pytest.approx(
        tail_s + fast.step_fixed_s + fast.step_seq_s + fast.step_token_s * 2049, rel=1e-3
    )
    slow = replace(fast, link_bytes_s=1e8)
    [lone] = [request(0, 0.0, [1, 2, 3, 4], output=2)]
    run(Shape(1, 1, hardware=slow), [lone])
    assert lone.finished_s > 4 * 512 * slow.kv_token_bytes / 1e8 > lone.first_token_s
    assert ledger.sent_bytes == 4 * 512 * slow.kv_token_bytes


def test_what_the_decode_node_holds_is_not_sent_again() -> None:
    talk = [request(0, 0.0, [1, 2]), request(1, 100.0, [1, 2, 3])]
    ledger, _ = run(Shape(1, 1), talk)
    # Of the second prompt, two of three blocks are there.
    assert ledger.sent_bytes == (2 + 1) * 512 * Hardware().kv_token_bytes
    assert ledger.hit_blocks == 2


def test_a_prompt_of_its_own_makes_a_decode_nodes_steps_longer() -> None:
    alone, _ = run(Shape(1, 1), [request(0, 0.0, [1, 2], output=200)])
    talk = [request(0, 0.0, [1, 2], output=200), request(1, 0.5, [5, 6], output=1)]
    both, _ = run(Shape(1, 1), talk, local=2000)
    assert both.local == 2
    assert both.tpot_s[-1] > alone.tpot_s[-1] + 0.0001


def test_more_requests_than_a_trace_has_keep_its_reuse_and_its_order() -> None:
    lines = random_trace(200, 1.0)
    requests = list(from_trace(lines, requests=700, seed=3))
    assert len(requests) == 700
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert [r.number for r in requests] == list(range(700))
    # Copies share nothing: with room for everything, each has the reuse of the trace.
    shape = Shape(1, 1, cache_blocks=100_000, decode_blocks=100_000)
    alone, _ = run(shape, list(from_trace(lines)))
    laid_over, _ = run(shape, list(from_trace(lines, requests=600, seed=3)))
    assert laid_over.hit_blocks == pytest.approx(3 * alone.hit_blocks, rel=0.15)


def test_a_trace_whose_times_do_not_begin_at_0_runs_as_one_that_does() -> None:
    """Part of a trace, or one whose times are those of a calendar."""
    lines = random_trace(60, 0.25)
    later = [replace(line, arrival_s=line.arrival_s + 2.0**20) for line in lines]
    for requests in (60, 180):
        alike = [simulate(Simulation(trace=trace, requests=requests)).figures for trace in (lines, later)]
        assert alike[0]["request_rate"] == pytest.approx(alike[1]["request_rate"])
        assert alike[0]["ttft_s"]["p99"] == pytest.approx(alike[1]["ttft_s"]["p99"])


def _write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


_GOOD = {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


def test_a_trace_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    [line] = read_trace(_write(tmp_path / "good", [_GOOD]), 512)
    assert line == TraceLine(1.0, 600, 3, [1, 2])
    (tmp_path / "of_windows").write_text(f"\ufeff{json.dumps(_GOOD)}\r\n\r\n", "utf-8")
    assert read_trace(tmp_path / "of_windows", 512) == [line]
    endless: list[dict[str, object]] = [{"timestamp": math.nan}, {"timestamp": math.inf}, {"output_length": math.inf}]
    wrong = [
        {"hash_ids": [1]},
        {"output_length": -1},
        {"input_length": "x"},
        {"input_length": 0, "hash_ids": []},
        {"timestamp": -1},
        {"output_length": 10**12},
    ]
    for bad in [*wrong, *endless]:
        with pytest.raises(ConfigError, match="line 2"):
            read_trace(_write(tmp_path / "bad", [_GOOD, {**_GOOD, **bad}]), 512)
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(_write(tmp_path / "empty", []), 512)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "missing", 512)


def test_the_highest_rate_keeps_the_share_and_a_little_more_does_not() -> None:
    base = Simulation(policy="least_load", requests=400, shape=Shape(2, 2), slo_ttft_s=0.5)
    found = highest_rate(base, 0.9)
    assert found is not None
    scale, figures = found
    assert figures["goodput"] >= 0.9
    assert simulate(replace(base, rate_scale=scale * 1.3)).figures["goodput"] < 0.9
    assert highest_rate(replace(base, slo_ttft_s=1e-6), 0.9) is None


@pytest.mark.parametrize("limit", [0.011, 0.016, 0.3, 1.0, 47.0])
def test_the_highest_rate_is_found_as_exactly_far_from_the_given_one(
    monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    def up_to_the_limit(simulation: Simulation, on_arrival: object) -> SimulationOutcome:
        return SimulationOutcome(simulation, {"goodput": float(simulation.rate_scale <= limit)}, Ledger())

    monkeypatch.setattr(run_module, "simulate", up_to_the_limit)
    found = highest_rate(Simulation(), 0.9)
    assert found is not None
    assert found[0] <= limit < found[0] * 1.04


def test_with_admission_an_overload_is_answered_429_and_more_requests_are_in_time() -> None:
    """At three times what the nodes can do; each of the router's three ways to refuse is taken."""
    base = Simulation(policy="least_load", requests=1500, rate=30.0, shape=Shape(2, 2), slo_ttft_s=3.0)
    all_in = simulate(base).figures
    limits = {
        "429: too late for the objectives": Admission(10_000, 60.0, Objectives(3.0, 0.1)),
        "429: too many requests are waiting": Admission(20, 60.0),
        "429: no node had room in time": Admission(10_000, 1.5),
    }
    for reason, admission in limits.items():
        figures = simulate(replace(base, admission=admission)).figures
        assert list(figures["refused"]) == [reason]
        assert figures["finished"] + figures["refused"][reason] == 1500
        assert figures["goodput"] > 2 * all_in["goodput"], reason


def test_admission_refuses_nobody_where_there_is_room() -> None:
    base = Simulation(requests=400, rate=2.0, shape=Shape(4, 4))
    figures = simulate(replace(base, admission=Admission(objectives=Objectives(5.0, 0.5)))).figures
    assert not figures["refused"]
    assert figures["finished"] == 400


def test_admission_counts_the_seconds_before_a_prefill_node_and_not_the_prompts() -> None:
    """A prefill node registers with its `max_num_seqs` as any node does, not with the one prompt that it computes at a time."""
    events, shape = Events(), Shape(1, 1)
    admission = Admission(max_queue_wait_s=0.0)
    router = SimulatedRouter(shape, events, policy="least_load", local_prefill_tokens=0, admission=admission)
    cluster = SimulatedCluster(shape, router, events)
    ledger = cluster.run(request(number, 0.0, [number]) for number in range(3))  # 0.03 s each
    assert not ledger.refusals


@pytest.mark.parametrize("name", ["max_num_seqs", "chunk_tokens", "layers", "step_fixed_s", "link_bytes_s"])
def test_hardware_that_can_do_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Hardware(**{name: 0})


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lines = [
        {
            "timestamp": 1000 * line.arrival_s,
            "input_length": line.input_tokens,
            "output_length": 5,
            "hash_ids": line.hash_ids,
        }
        for line in random_trace(100, 0.2)
    ]
    return _write(tmp_path / "trace.jsonl", lines)


def test_the_command_prints_a_column_for_each_policy_and_writes_json_and_a_plot(
    tmp_path: Path, trace_file: Path
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "run.svg"
    arguments = ["--trace", str(trace_file), "--policy", "round_robin,least_load", "--prefill", "2", "--decode", "2"]
    shown = CliRunner().invoke(cli.app, [*arguments, "--json", str(out), "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "prefix hit rate" in shown.output
    assert [figures["policy"] for figures in json.loads(out.read_text())] == ["round_robin", "least_load"]
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "no_such"],
        ["--hardware", "speed=3"],
        ["--hardware", "layers=x"],
        ["--hardware", "layers=inf"],
        ["--rate", "0"],
        ["--json", "/nowhere/run.json"],
        ["--json", "/tmp"],
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(arguments: list[str]) -> None:
    shown = CliRunner().invoke(cli.app, ["--requests", "5", *arguments])
    assert shown.exit_code == 78
    assert shown.output.count("kvrelay:") == 1


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--rate", "1e-320", 78),  # ended with a traceback, as too large a block did
        ("--block-tokens", "1000000000000000000000", 2),
        ("--rate", "inf", 78),
        ("--rate-scale", "inf", 78),
        ("--slo-ttft", "inf", 78),
        ("--prefill", "100000000", 2),  # began only after minutes
        ("--goodput", "2", 2),
    ],
)
def test_what_cannot_be_simulated_is_refused(option: str, value: str, code: int) -> None:
    shown = CliRunner().invoke(cli.app, ["--requests", "5", option, value])
    assert (shown.exit_code, option in shown.output) == (code, True)


MOONCAKE = os.environ.get("MOONCAKE_TRACE", "")


@pytest.mark.skipif(not MOONCAKE, reason="MOONCAKE_TRACE names no copy of Mooncake's conversation trace")
@pytest.mark.parametrize(("nodes", "published"), [(2, 13.1), (4, 12.1), (8, 10.7)])
def test_round_robin_reproduces_the_published_hit_rates(nodes: int, published: float) -> None:
    lines = read_trace(Path(MOONCAKE), 512)
    figures = simulate(Simulation(policy="round_robin", trace=lines, shape=Shape(nodes, nodes))).figures
    assert 100 * figures["hit_rate"] == pytest.approx(published, abs=0.1)


def test_two_traces_are_joined_with_shares_that_turn_and_conversations_stay_whole(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:{second:02d}.9799600,{700 + second},{second}" for second in range(60)]
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    first = read_trace(azure, 512)
    assert [(line.input_tokens, line.output_tokens) for line in first[:2]] == [(700, 1), (701, 1)]
    assert len({hash_id for line in first for hash_id in line.hash_ids}) == 120, "no two prompts share a block"
    talks = [TraceLine(talk + turn * 20, 1000 + talk, 9, [0, 1 + talk]) for talk in range(20) for turn in range(3)]
    second = sorted(talks, key=lambda line: line.arrival_s)
    period_s = 4000.0
    found = list(joined((first, second), requests=8000, rates=(2.0, 4.0), period_s=period_s))
    assert [each.arrival_s for each in found] == sorted(each.arrival_s for each in found)

    def rate(begin_s: float, of_second: bool) -> float:
        inside = [each for each in found if begin_s <= each.arrival_s < begin_s + 500]
        return sum((each.input_tokens >= 1000) == of_second for each in inside) / 500

    assert rate(0, False) == pytest.approx(2.0 * 0.78, rel=0.15)
    assert rate(0, True) == pytest.approx(4.0 * 0.22, rel=0.15)
    assert rate(1750, True) == pytest.approx(4.0 * 0.79, rel=0.15)
    turns = Counter(each.hashes[1] for each in found if each.input_tokens >= 1000)
    assert sum(count == 3 for count in turns.values()) > 0.9 * len(turns)
    again = list(joined((first, second), requests=8000, rates=(2.0, 4.0), period_s=period_s))
    assert [each.hashes for each in again] == [each.hashes for each in found]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,100000000,1",
        "TIMESTAMP,ContextTokens\n1,2,3",
    ],
)
def test_a_malformed_line_of_an_azure_trace_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(tmp_path / "a.csv", 512)

"""Policies on a trace, by the simulator: hit rates against an oracle, imbalance, time to first token at rising load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.results import Result, Target

from router.policy import POLICIES
from router.simulator.hardware import Shape
from router.simulator.run import Simulation, simulate
from router.simulator.traces import read_trace

ORACLE = {2: 0.211, 4: 0.287, 8: 0.351}
"""Of Mooncake's conversation trace, by prefill nodes with 5,000 blocks of 512 tokens each: one that always knows best."""
LEVELS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


def run(trace: Path, quick: bool) -> Result:
    """All figures. Decode nodes as many as prefill nodes."""
    result = Result("trace")
    lines = read_trace(trace, 512)
    base = Simulation(trace=lines, requests=1500 if quick else None)
    means: dict[tuple[int, str], float] = {}
    for nodes, best in ORACLE.items():
        for policy in POLICIES if nodes == 4 else ("kv_aware", "round_robin"):
            figures = simulate(replace(base, policy=policy, shape=Shape(nodes, nodes))).figures
            ttft = means[nodes, policy] = figures["ttft_s"]["mean"]
            kv_aware = policy == "kv_aware"
            note = f"mean time to first token {ttft:.2f} s, imbalance {figures['prefill_imbalance']:.3f}"
            result.add(
                f"{nodes} + {nodes} nodes, {policy}: hit rate",
                100 * figures["hit_rate"],
                "%",
                limit=100 * best,
                limit_name="oracle",
                target=Target(0.95, of_share=True) if kv_aware else None,
                note=f"{note}; {figures['local_prefills']:,} prompts on decode nodes",
            )
            if kv_aware:
                result.add(f"{nodes} + {nodes} nodes, kv_aware: prefill work, busiest over mean",
                           figures["prefill_imbalance"], "", target=Target(1.05, at_most=True))  # fmt: skip
            result.details[f"{nodes} {policy}"] = figures
    result.add("4 + 4 nodes, mean time to first token: round_robin over kv_aware",
               means[4, "round_robin"] / means[4, "kv_aware"], "x", target=Target(1.3))  # fmt: skip
    for level in LEVELS:
        both = {
            policy: simulate(replace(base, policy=policy, rate_scale=level, shape=Shape(4, 4))).figures
            for policy in ("round_robin", "kv_aware")
        }
        ratio = both["round_robin"]["ttft_s"]["mean"] / both["kv_aware"]["ttft_s"]["mean"]
        busy = both["round_robin"]["prefill_utilisation"]
        result.add(f"the same at {level:g} x the rate", ratio, "x", target=Target(1.0),
                   note=f"round_robin keeps its prefill nodes {busy:.0%} busy")  # fmt: skip
        result.details[f"level {level:g}"] = both
    return result

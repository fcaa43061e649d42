"""Real nodes: a trace scaled down to a small model on the processor, and the gap in a stream whose decode node dies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from load.results import Result, Target
from load.shape import SHAPES, make_model_folder
from load.worker import ROOT
from system import running_system

_SCALE = 32
"""A block of 512 tokens becomes one of 16."""
_KV_BLOCKS = 1500


def trace(path: Path, quick: bool) -> Result:
    """kv_aware and round_robin, two prefill and two decode nodes each."""
    result = Result("real_trace")
    requests, rate_scale = (60, 2.0) if quick else (400, 2.0)
    found = {policy: _replay(path, policy, requests, rate_scale) for policy in ("round_robin", "kv_aware")}
    hit = {policy: figures["hit_rate"] for policy, figures in found.items()}
    ttft = {policy: figures["ttft_s"]["mean"] for policy, figures in found.items()}
    size = f"the first {requests} requests, 1:{_SCALE}, {rate_scale:g} x the rate, {_KV_BLOCKS} blocks a node"
    for policy in found:
        result.add(f"2 + 2 real nodes, {policy}: hit rate", 100 * hit[policy], "%", note=size)
        result.add(f"2 + 2 real nodes, {policy}: mean time to first token", 1e3 * ttft[policy], "ms")
    result.add("hit rate: kv_aware over round_robin", hit["kv_aware"] / hit["round_robin"], "x", target=Target(1.0))
    result.add("mean time to first token: round_robin over kv_aware", ttft["round_robin"] / ttft["kv_aware"], "x",
               target=Target(1.0))  # fmt: skip
    result.details |= found
    return result


def _replay(path: Path, policy: str, requests: int, rate_scale: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvrelay-real-") as temporary:
        folder = Path(temporary)
        model = make_model_folder(SHAPES["tiny"], folder)
        options = ("--model", str(model), "--load-format", "dummy", "--dtype", "float32", "--policy", policy)
        size = ("--kv-blocks", str(_KV_BLOCKS), "--max-model-len", "8192", "--log-level", "warning")
        with running_system(folder, *options, *size, "--prefill", "2", "--decode", "2") as system:
            system.wait_usable(2, 2)
            out = folder / "load.json"
            command = [sys.executable, "-m", "common.cli", "load", "run", "--url", system.url, "--trace", str(path)]
            command += ["--scale", str(_SCALE), "--rate-scale", str(rate_scale), "--requests", str(requests)]
            subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, timeout=540, stdout=subprocess.DEVNULL)
            answer: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return answer.get("summary", answer)


def recovery(quick: bool) -> Result:
    """kill -9 of a decode node under a stream with a 2,048-token prompt."""
    from fault import test_recovery_gap as gap
    from load.results import median

    result = Result("recovery")
    with tempfile.TemporaryDirectory(prefix="kvrelay-gap-") as temporary, gap.serving(Path(temporary)) as system:
        repeats = 1 if quick else 3
        relayed = [gap.longest_gap(system, 2 * i, with_prefill_node=False) for i in range(repeats)]
        computed = [gap.longest_gap(system, 2 * i + 1, with_prefill_node=True) for i in range(repeats)]
    result.add(f"longest gap across the death of a decode node, {gap.PROMPT_TOKENS:,} tokens", median(relayed), "s",
               limit=median(computed), limit_name="the prompt computed again",
               target=Target(0.2, at_most=True, of_share=True))  # fmt: skip
    result.details |= {"relayed_s": relayed, "computed_s": computed}
    return result

"""Real nodes: a trace scaled down to a small model on the processor, and the gap in a stream whose decode node dies."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.results import Result, Target
from bench.shape import SHAPES, make_model_folder
from bench.worker import ROOT
from support.system import running_system

_SCALE = 32
"""A block of 512 tokens becomes one of 16."""
_KV_BLOCKS = 1500
_RATE_SCALE = 2.0
_REQUESTS = 300
"""About a minute for each policy."""
_REQUEST_S = 60.0


def trace(path: Path, quick: bool, requests: int = 0) -> Result:
    """kv_aware and round_robin in turn, two prefill and two decode nodes each; the first `requests` of the trace."""
    result = Result("real_trace")
    requests = requests or (60 if quick else _REQUESTS)
    found = {policy: _replay(path, policy, requests) for policy in ("round_robin", "kv_aware")}
    hit = {policy: figures["hit_rate"] for policy, figures in found.items()}
    ttft = {policy: figures["ttft_s"]["mean"] for policy, figures in found.items()}
    for policy, figures in found.items():
        lasts_s = figures["trace_s"] / _RATE_SCALE
        size = (
            f"requests 1 to {requests:,} of the trace, its first {figures['trace_s']:.0f} s, 1:{_SCALE}, in {lasts_s:.0f} s; "
            f"{_KV_BLOCKS:,} blocks a node; {100 * figures['error_rate']:.1f} % failed"
        )
        result.add(f"2 + 2 real nodes, {policy}: hit rate", 100 * hit[policy], "%",
                   limit=100 * reusable(path, requests), limit_name="one cache that forgets nothing", note=size)  # fmt: skip
        result.add(f"2 + 2 real nodes, {policy}: mean time to first token", 1e3 * ttft[policy], "ms")
    result.add("hit rate: kv_aware over round_robin", hit["kv_aware"] / hit["round_robin"], "x", target=Target(1.0))
    result.add("mean time to first token: round_robin over kv_aware", ttft["round_robin"] / ttft["kv_aware"], "x",
               target=Target(1.0))  # fmt: skip
    result.details |= found
    return result


def reusable(path: Path, requests: int) -> float:
    """The share of the slice's prompt tokens that one cache which forgets nothing would have."""
    seen, held, total = set[int](), 0, 0
    for line in path.read_text("utf-8").splitlines()[:requests]:
        request = json.loads(line)
        leading = 0
        while leading < len(request["hash_ids"]) and request["hash_ids"][leading] in seen:
            leading += 1
        held += min(512 * leading, request["input_length"])
        total += request["input_length"]
        seen.update(request["hash_ids"])
    return held / total


def _replay(path: Path, policy: str, requests: int) -> dict[str, Any]:
    """One run. What takes longer than `_REQUEST_S` fails, so that a machine that is too slow does not take for ever."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-real-") as temporary:
        folder = Path(temporary)
        model = make_model_folder(SHAPES["tiny"], folder)
        options = ("--model", str(model), "--load-format", "dummy", "--dtype", "float32", "--policy", policy)
        size = ("--kv-blocks", str(_KV_BLOCKS), "--max-model-len", "8192", "--log-level", "warning")
        many = ("--max-waiting", str(requests))
        with running_system(folder, *options, *size, *many, "--prefill", "2", "--decode", "2") as system:
            system.wait_usable(2, 2)
            out = folder / "load.json"
            command = [sys.executable, "-m", "kvrelay", "load", "run", "--url", system.url, "--trace", str(path)]
            command += ["--scale", str(_SCALE), "--rate-scale", str(_RATE_SCALE), "--requests", str(requests)]
            command += ["--timeout", str(_REQUEST_S), "--max-error-rate", "1", "--json", str(out)]
            lines = path.read_text("utf-8").splitlines()[:requests]
            trace_s = json.loads(lines[-1])["timestamp"] / 1000
            limit_s = trace_s / _RATE_SCALE + _REQUEST_S + 30.0
            subprocess.run(command, cwd=ROOT, check=True, timeout=limit_s, stdout=subprocess.DEVNULL)
            answer: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return answer["summary"] | {"trace_s": trace_s}


def recovery(quick: bool) -> Result:
    """kill -9 of a decode node under a stream with a 2,048-token prompt."""
    from bench.results import median
    from fault import test_recovery_gap as gap

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

"""Two context-parallel ranks against two tensor-parallel ones and against one rank: a decode step with a long context, a prompt."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from bench.context_ranks import WAYS
from bench.results import Result, median
from bench.session import Session
from bench.shape import SHAPES, make_model_folder
from support.ports import free_port
from support.rank_processes import Case, run_ranks

_CONTEXT, _PROMPT, _CHUNK = 16_384, 2048, 512
_MODELS = {
    "33M": SHAPES["33m"],
    "33M with one KV head": replace(SHAPES["33m"], name="33m-mqa", kv_heads=1),
}
"""Tensor-parallel ranks divide four KV heads; of one, each holds a copy."""


def run(session: Session) -> Result:
    """All ways by turns, in rounds. Ratios are medians of the rounds'."""
    result = Result("context_parallel")
    session.stop_system()
    session.stop_plain()
    rounds, steps = session.repeats(9, 2), session.repeats(15, 3)
    for name, shape in _MODELS.items():
        with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as parent:
            ports = [free_port() for way in WAYS.values() if way.tp * way.cp > 1]
            arguments = {
                "folder": str(make_model_folder(shape, Path(parent))),
                "ports": ports,
                "context": _CONTEXT,
                "prompt": _PROMPT,
                "chunk": _CHUNK,
                "steps": steps,
                "rounds": rounds + 1,
            }
            [(first, second)] = run_ranks("bench.context_ranks:measure", [Case(2, 1, arguments)], timeout_s=1800)
        if first.error or second.error:
            raise RuntimeError(first.message or second.message)
        found = {way: {what: times[1:] for what, times in each.items()} for way, each in first.value.items()}
        prompt = f"prompt of {_PROMPT} tokens"
        labels = {
            "decode": f"step at {_CONTEXT} tokens",
            "prefill": prompt,
            "prefill, processor": f"{prompt}, processor time of a rank",
        }
        for what, label in labels.items():
            for way, each in found.items():
                against = [a / b for a, b in zip(found["one rank"][what], each[what], strict=True)]
                note = f"one rank takes {median(against):.2f} times as long"
                result.add(f"{name}, {label}, {way}", 1e3 * median(each[what]), "ms", note=note)
        result.details[name] = found
    return result

"""Attention alone, native and by PyTorch: bytes of KV read per second, and floating-point operations of prompts."""

from __future__ import annotations

import contextlib

from bench.attention_steps import DIM, KV_HEADS, LAYERS, Q_HEADS
from bench.results import Result, Target
from bench.session import Session
from bench.worker import PASSIVE, Worker

_BATCH, _CONTEXT, _SHORT, _PROMPT = 16, 1000, 100, 2048
_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3": 1}
_READ_SHARE, _GEMM_SHARE = 0.6, 0.5
_BACKENDS = {"native": True, "PyTorch": False}


def run(session: Session) -> Result:
    """Decode steps against the read bandwidth, prompts against the rate of matrix products, in alternating rounds."""
    result = Result("attention")
    rounds, repeats = session.repeats(5, 2), session.repeats(5, 2)
    with contextlib.closing(
        Worker("bench.attention_steps:AttentionSteps", environ=PASSIVE, num_tokens=20_000)
    ) as steps:
        best: dict[tuple[str, str, str], float] = {}
        for _ in range(rounds):
            session.limits.measure_read()
            session.limits.measure_gemm("bfloat16")
            session.limits.measure_gemm("float32")
            for name, native in _BACKENDS.items():
                for cache in _BYTES:
                    base = {"native": native, "cache": cache, "repeats": repeats}
                    took = {
                        "long": steps.call("decode", batch=_BATCH, context=_CONTEXT, **base),
                        "short": steps.call("decode", batch=_BATCH, context=_SHORT, **base),
                        "prompt": steps.call("prefill", tokens=_PROMPT, **{**base, "repeats": 1}),
                    }
                    for what, seconds in took.items():
                        best[name, cache, what] = min(best.get((name, cache, what), seconds), seconds)
    read = session.limits.measure_read()
    for (name, cache, what), seconds in best.items():
        is_native = name == "native"
        if what == "prompt":
            flop = 2 * LAYERS * Q_HEADS * DIM * _PROMPT * (_PROMPT + 1)
            limit = session.limits.measure_gemm("float32" if cache == "float32" else "bfloat16")
            target = Target(_GEMM_SHARE, of_share=True) if is_native else None
            label, value, unit, limit_name = f"prompt of {_PROMPT}", flop / seconds / 1e9, "GFLOP/s", "GEMM"
            result.add(
                f"{name}, {cache}, {label}", value, unit, limit=limit / 1e9, limit_name=limit_name, target=target
            )
            continue
        context = _CONTEXT if what == "long" else _SHORT
        size = 2 * LAYERS * _BATCH * context * KV_HEADS * DIM * _BYTES[cache]
        result.add(
            f"{name}, {cache}, {_BATCH} x {context} tokens",
            size / seconds / 1e9,
            "GB/s",
            limit=read / 1e9,
            limit_name="read bandwidth",
            target=Target(_READ_SHARE, of_share=True) if is_native and what == "long" else None,
            note=f"{1e3 * seconds:.1f} ms for {LAYERS} layers",
        )
    return result

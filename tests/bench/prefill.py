"""A prompt of 2,048 tokens: its time to first token over HTTP, and the arithmetic that is behind it."""

from __future__ import annotations

from bench import client
from bench.client import complete
from bench.results import Result, Target, median
from bench.session import Session
from bench.shape import random_prompt

PROMPT = 2048
_CHUNK = 512


def run(session: Session) -> Result:
    """The same prompt length through the cluster and through the plain engine, alternating, against GEMM rates."""
    result = Result("prefill")
    system, plain, limits = session.system(), session.plain, session.limits
    client.run(first_token_s(session, system.url))
    served, alone = [], []
    bf16 = fp32 = 0.0
    for _ in range(session.repeats(4)):
        bf16, fp32 = limits.measure_gemm("bfloat16"), limits.measure_gemm("float32")
        served.append(client.run(first_token_s(session, system.url)))
        alone.append(plain.call("prefill", tokens=PROMPT, chunk=_CHUNK))
    flop = session.shape.prefill_flop(PROMPT)
    ttft_s, plain_s = median(served), median(alone)
    rate = flop / ttft_s
    result.add(
        f"{PROMPT} tokens, time to first token",
        ttft_s,
        "s",
        limit=plain_s,
        limit_name="plain engine",
        note=f"{flop / 1e12:.2f} TFLOP of linear layers and causal attention",
    )
    result.add(
        "arithmetic, by that time",
        rate / 1e9,
        "GFLOP/s",
        limit=bf16 / 1e9,
        limit_name="bf16 GEMM",
        target=Target(0.7, of_share=True),
    )
    result.add(
        "the same",
        rate / 1e9,
        "GFLOP/s",
        limit=max(bf16, fp32) / 1e9,
        limit_name="best GEMM of any dtype",
        target=Target(0.7, of_share=True),
    )
    result.add(
        "arithmetic, plain engine", flop / plain_s / 1e9, "GFLOP/s", limit=max(bf16, fp32) / 1e9, limit_name="best GEMM"
    )
    result.details = {"served_s": served, "plain_s": alone, "flop": flop}
    return result


async def first_token_s(session: Session, url: str, tokens: int = PROMPT) -> float:
    """Time to first token of a prompt that nobody has seen, with nothing else running."""
    stream = await complete(url, session.model_name, random_prompt(session.shape, tokens, session.rng), 2)
    return (await stream.wait()).ttft_s

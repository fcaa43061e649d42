"""Decode throughput over HTTP, through router and nodes: one stream, and sixteen at once."""

from __future__ import annotations

import asyncio

from bench import client
from bench.client import Stream, complete, decode_rate, gaps
from bench.results import Result, Target, median, percentile
from bench.session import Session
from bench.shape import random_prompt
from bench.worker import Worker

_SINGLE_PROMPT = 64
_BATCH, _BATCH_PROMPT, _BATCH_TOKENS = 16, 256, 128

# On the machine of the reference figures a plain loop without a server reaches 22.8 tokens/s, and 22 are asked for.
_SERVED_OF_PLAIN = 22 / 22.8


def run_single(session: Session) -> Result:
    """One stream against the plain loop of the same model code, alternating, and against memory bandwidth."""
    result = Result("decode_single")
    system, plain, limits = session.system(), session.plain, session.limits
    steps = session.repeats(96, 16)
    served, alone, reads = [], [], []
    for _ in range(session.repeats(5) + 1):
        reads.append(limits.measure_read())
        alone.append(plain.call("decode", batch=1, context=_SINGLE_PROMPT, steps=steps)["tokens_per_s"])
        served.append(client.run(_one_stream(session, system.url, steps)))
    served, alone = served[1:], alone[1:]  # the first round of each is its warm-up
    rate, plain_rate = median(served), median(alone)
    bound = max(reads) / session.shape.weight_bytes_per_token()
    result.add("one stream", rate, "tok/s", limit=bound, limit_name="read bandwidth / weight bytes", target=Target(22))
    result.add("plain loop, no server", plain_rate, "tok/s", limit=bound, limit_name="read bandwidth / weight bytes")
    ratios = [s / a for s, a in zip(served, alone, strict=True)]
    result.add(
        "one stream against the plain loop",
        median(ratios),
        "x",
        target=Target(_SERVED_OF_PLAIN),
        note="median of alternating pairs; the target is 22 tok/s where the plain loop gives 22.8",
    )
    result.details = {"served": served, "plain": alone, "weight_bytes": session.shape.weight_bytes_per_token()}
    return result


async def _one_stream(session: Session, url: str, tokens: int) -> float:
    prompt = random_prompt(session.shape, _SINGLE_PROMPT, session.rng)
    stream = await complete(url, session.model_name, prompt, tokens + 1)
    return decode_rate(await stream.wait())


def run_batch(session: Session) -> Result:
    """Sixteen requests sent at once; their prompts' time counts."""
    result = Result("decode_batch")
    system, plain = session.system(), session.plain
    tokens = session.repeats(_BATCH_TOKENS, 32)
    rates, itls, ttfts, alone = [], [], [], []
    for _ in range(session.repeats(3)):
        alone.append(_plain_batch(plain, tokens))
        streams = client.run(_burst(session, system.url, tokens))
        wall_s = max(s.ended_s for s in streams) - min(s.sent_s for s in streams)
        rates.append(sum(count for s in streams for _, count in s.token_times()) / wall_s)
        itls += [gap for _, gap in gaps(streams)]
        ttfts += [s.ttft_s for s in streams]
    result.add(
        f"{_BATCH} x ({_BATCH_PROMPT} -> {tokens}), in all",
        median(rates),
        "tok/s",
        limit=median(alone),
        limit_name="plain engine, prompts then batch",
        target=Target(100),
        note="from the first request sent to the last token received, prompts included",
    )
    result.add("inter-token latency, median", 1e3 * median(itls), "ms")
    result.add("inter-token latency, p99", 1e3 * percentile(itls, 0.99), "ms")
    result.add("time to first token, median", median(ttfts), "s")
    result.details = {"rates": rates, "plain": alone}
    return result


def _plain_batch(plain: Worker, tokens: int) -> float:
    """Tokens/s of the plain engine if it computed all prompts, one after the other, and then decoded the whole batch."""
    prompt_s = plain.call("prefill", tokens=_BATCH_PROMPT, chunk=_BATCH_PROMPT)
    context = _BATCH_PROMPT + tokens // 2
    step_s = plain.call("decode", batch=_BATCH, context=context, steps=min(tokens, 16))["median_step_s"]
    return _BATCH * tokens / (_BATCH * prompt_s + tokens * step_s)


async def _burst(session: Session, url: str, tokens: int) -> list[Stream]:
    prompts = [random_prompt(session.shape, _BATCH_PROMPT, session.rng) for _ in range(_BATCH)]
    streams = await asyncio.gather(*(complete(url, session.model_name, prompt, tokens) for prompt in prompts))
    return list(await asyncio.gather(*(stream.wait() for stream in streams)))

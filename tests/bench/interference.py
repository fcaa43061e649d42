"""Eight running streams, and long prompts that arrive meanwhile: how each slows down the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from bench import client
from bench.client import Stream, complete, gaps
from bench.prefill import PROMPT, first_token_s
from bench.results import Result, Target, median, percentile
from bench.session import Session
from bench.shape import random_prompt

_STREAMS, _STREAM_PROMPT = 8, 256
_REFERENCE_UTILISATION = 0.44
"""Prefill time / arrival interval on the machine for which the targets were set; slower machines are also measured at it."""


@dataclass
class _Run:
    """Arrival times and gaps of one run; times as of `time.perf_counter`."""

    quiet_gaps: list[float] = field(default_factory=list)
    loaded_gaps: list[float] = field(default_factory=list)
    overlap_gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)


def run(session: Session) -> Result:
    """The measurement for each requested way of sharing the processor."""
    result = Result("interference")
    for favor in session.options.favors:
        session.stop_plain()
        url = session.system(favor).url
        client.run(first_token_s(session, url))
        quiet = [client.run(first_token_s(session, url)) for _ in range(session.repeats(3))]
        quiet_s = median(quiet)
        intervals = {session.options.arrival_s: f"every {session.options.arrival_s:g} s"}
        utilisation = quiet_s / session.options.arrival_s
        if utilisation > 1.2 * _REFERENCE_UTILISATION:
            scaled = quiet_s / _REFERENCE_UTILISATION
            intervals[scaled] = f"every {scaled:.0f} s ({_REFERENCE_UTILISATION:.0%} utilisation, as the reference has)"
        for interval_s, label in intervals.items():
            measured = client.run(_measure(session, url, interval_s))
            session.system(favor).wait_whole()
            _report(result, f"{favor}, {label}", measured, quiet_s)
            result.details[f"{favor} {interval_s:g}"] = {"ttfts": measured.ttfts, "quiet_ttfts": quiet}
    return result


def _report(result: Result, label: str, run: _Run, quiet_ttft_s: float) -> None:
    quiet_p99 = percentile(run.quiet_gaps, 0.99)
    result.add(f"{label}: ITL p50, quiet", 1e3 * median(run.quiet_gaps), "ms", note=f"p99 {1e3 * quiet_p99:.0f} ms")
    for name, found, target in (
        ("ITL p99, loaded period", run.loaded_gaps, Target(1.8, at_most=True, of_share=True)),
        ("ITL p99, overlap only", run.overlap_gaps, Target(1.8, at_most=True, of_share=True)),
    ):
        result.add(
            f"{label}: {name}",
            1e3 * percentile(found, 0.99),
            "ms",
            limit=1e3 * quiet_p99,
            limit_name="quiet p99",
            target=target,
            note=f"p50 {1e3 * median(found):.0f} ms, longest {1e3 * max(found, default=0.0):.0f} ms, {len(found)} gaps",
        )
    result.add(
        f"{label}: TTFT of {PROMPT}-token prompts",
        median(run.ttfts),
        "s",
        limit=quiet_ttft_s,
        limit_name="quiet TTFT",
        target=Target(2.0, at_most=True, of_share=True),
        note=f"{len(run.ttfts)} prompts, longest {max(run.ttfts, default=0.0):.1f} s",
    )


async def _measure(session: Session, url: str, interval_s: float) -> _Run:
    """Quiet, loaded, quiet again: contexts grow meanwhile, so a quiet phase on one side only would be unfair."""
    prompts = session.repeats(5, 2)
    quiet_s = session.repeats(15, 3)
    streams = await _start_streams(session, url)
    try:
        begun = time.perf_counter()
        await asyncio.sleep(quiet_s)
        loaded_from = time.perf_counter()
        arrivals = [asyncio.create_task(_arrive(session, url, i * interval_s)) for i in range(prompts)]
        answered = list(await asyncio.gather(*arrivals))
        loaded_until = max(time.perf_counter(), loaded_from + prompts * interval_s)
        await asyncio.sleep(max(0.0, loaded_until - time.perf_counter()))
        await asyncio.sleep(quiet_s)
        ended = time.perf_counter()
        if any(stream.ended.is_set() for stream in streams):
            raise RuntimeError("a background stream ended before the measurement did")
    finally:
        for stream in streams:
            stream.close()
    spans = [(stream.sent_s, stream.sent_s + stream.ttft_s) for stream in answered]
    loaded = gaps(streams, loaded_from, loaded_until)
    quiet = gaps(streams, begun, loaded_from) + gaps(streams, loaded_until + 1.0, ended)
    return _Run(
        quiet_gaps=[gap for _, gap in quiet],
        loaded_gaps=[gap for _, gap in loaded],
        # A gap counts when any part of it lies inside some prompt's prefill.
        overlap_gaps=[gap for at, gap in loaded if any(lo < at and at - gap < hi for lo, hi in spans)],
        ttfts=[stream.ttft_s for stream in answered],
    )


async def _start_streams(session: Session, url: str) -> list[Stream]:
    # Long enough not to end, short enough that all of them fit the decode node's KV memory at their longest.
    fitting = int(0.8 * session.kv_memory_bytes / session.shape.kv_bytes_per_token() / _STREAMS)
    tokens = min(fitting - _STREAM_PROMPT, 30_000)
    prompts = [random_prompt(session.shape, _STREAM_PROMPT, session.rng) for _ in range(_STREAMS)]
    streams = await asyncio.gather(*(complete(url, session.model_name, prompt, tokens) for prompt in prompts))
    for stream in streams:
        await stream.wait_first()
    await asyncio.sleep(2.0)  # the last of them has joined the batch
    return list(streams)


async def _arrive(session: Session, url: str, after_s: float) -> Stream:
    await asyncio.sleep(after_s)
    prompt = random_prompt(session.shape, PROMPT, session.rng)
    return await (await complete(url, session.model_name, prompt, 2)).wait()

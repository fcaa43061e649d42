"""What LoRA adapters cost: decode steps and prompts with them against those without, by the same model code."""

from __future__ import annotations

from bench.results import Result, Target, median
from bench.session import Session

_BATCH, _CONTEXT, _ADAPTERS, _RANK, _PROMPT = 16, 256, 4, 16, 512


def run(session: Session) -> Result:
    """Sixteen sequences over four adapters of all linear layers, and a prompt with one; alternating pairs."""
    result = Result("lora")
    plain = session.plain
    plain.call("load_adapters", count=_ADAPTERS, rank=_RANK)
    steps = session.repeats(24, 6)
    without, having, prompts, adapted = [], [], [], []
    for _ in range(session.repeats(7) + 1):
        for adapters, rates in ((0, without), (_ADAPTERS, having)):
            call = plain.call("decode", batch=_BATCH, context=_CONTEXT, steps=steps, adapters=adapters)
            rates.append(_BATCH / call["median_step_s"])
        for adapter, times in ((0, prompts), (1, adapted)):
            times.append(plain.call("prefill", tokens=_PROMPT, chunk=_PROMPT, adapter=adapter))
    pairs = list(zip(having, without, strict=True))[1:]  # the first round is the warm-up
    result.add(f"batch {_BATCH}, no adapter", median(without[1:]), "tok/s")
    result.add(
        f"batch {_BATCH}, {_ADAPTERS} adapters of rank {_RANK}: throughput lost",
        100 * median([1 - rate / base for rate, base in pairs]),
        "%",
        target=Target(15, at_most=True),
        note=f"{median(having[1:]):.0f} tok/s",
    )
    result.add(
        f"prompt of {_PROMPT} tokens with an adapter: time added",
        100 * median([time / base - 1 for time, base in list(zip(adapted, prompts, strict=True))[1:]]),
        "%",
    )
    result.details = {"without": without, "with": having, "prompts": prompts, "adapted prompts": adapted}
    return result

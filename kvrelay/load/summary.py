"""Summary of a run, at its end and while it runs: counts, rates and percentiles of its outcomes. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvrelay.load.outcome import RequestOutcome

LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "between tokens (events)",
    "tpot_s": "per token after the first",
    "e2e_s": "whole request",
}
"""Latencies of a summary, with their titles in tables."""
_PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", *(f"p{percent}" for percent in _PERCENTILES), "max")
"""What a summary has of each latency."""
_WINDOW = 1000
"""Number of last requests that the figures cover."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values (at least one), with linear interpolation."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum, in seconds; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{percent}": round(percentile(ordered, percent), 6) for percent in _PERCENTILES}
    return {"mean": round(sum(ordered) / len(ordered), 6), **named, "max": round(ordered[-1], 6)}


def summarise(outcomes: Sequence[RequestOutcome], slo_ttft_s: float | None, slo_tpot_s: float | None) -> dict[str, Any]:
    """The content of the table and of the JSON file.

    Latencies cover successful requests; rates cover the time from the first request's start to the last one's end.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    wall_s = max((o.ended_s for o in outcomes), default=0.0) - min((o.sent_s for o in outcomes), default=0.0)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    met = [outcome for outcome in good if within(outcome.ttft_s, outcome.tpot_s, slo_ttft_s, slo_tpot_s)]

    def per_second(count: float) -> float:
        return round(count / wall_s, 3) if wall_s > 0 else 0.0

    return {
        "requests": len(outcomes),
        "succeeded": len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        "error_rate": round(1 - len(good) / len(outcomes), 6) if outcomes else 0.0,
        "first_errors": list(dict.fromkeys(o.detail for o in outcomes if o.error))[:3],
        "wall_s": round(wall_s, 3),
        "requests_per_s": per_second(len(good)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prompt_tokens_per_s": per_second(prompt_tokens),
        "output_tokens_per_s": per_second(output_tokens),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "hit_rate": round(sum(o.cached_tokens for o in good) / prompt_tokens, 6) if prompt_tokens else None,
        "prefill": dict(Counter(outcome.prefill for outcome in good if outcome.prefill)),
        "relayed_bytes": sum(outcome.relayed_bytes for outcome in good),
        "prefill_nodes": dict(sorted(Counter(o.prefill_node for o in good if o.prefill_node).items())),
        "decode_nodes": dict(sorted(Counter(o.decode_node for o in good if o.decode_node).items())),
        "retried": sum(outcome.attempts > 1 for outcome in outcomes),
        "ttft_s": distribution(o.ttft_s for o in good if o.ttft_s is not None),
        "itl_s": distribution(gap_s for o in good for gap_s in o.itl_s),
        "tpot_s": distribution(o.tpot_s for o in good if o.tpot_s is not None),
        "e2e_s": distribution(o.e2e_s for o in good),
        "late_s": distribution(o.late_s for o in outcomes),
        "slo": {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s},
        "goodput_per_s": per_second(len(met)),
        "within_slo": round(len(met) / len(outcomes), 6) if outcomes else 0.0,
    }


def within(ttft_s: float | None, tpot_s: float | None, slo_ttft_s: float | None, slo_tpot_s: float | None) -> bool:
    """Whether a request of these times met both objectives; None: no objective. An answer of one token has no time per later
    token."""
    if slo_ttft_s is not None and (ttft_s is None or ttft_s > slo_ttft_s):
        return False
    return slo_tpot_s is None or tpot_s is None or tpot_s <= slo_tpot_s


def window_rates(result: Mapping[str, Any], key: str, windows: int) -> list[float]:
    """`key` per second in equal parts of the run, by when requests ended; [] for a run that took no time."""
    samples, slo = result["samples"], result["summary"]["slo"]
    wall_s = result["summary"]["wall_s"]
    if not wall_s:
        return []
    first_s = min(samples["sent_s"])
    counts = [0.0] * windows
    columns = ("sent_s", "e2e_s", "ttft_s", "tpot_s", "output_tokens", "error")
    for sent_s, e2e_s, ttft_s, tpot_s, tokens, error in zip(*(samples[name] for name in columns), strict=True):
        if error or (key == "goodput_per_s" and not within(ttft_s, tpot_s, slo["ttft_s"], slo["tpot_s"])):
            continue
        window = min(windows - 1, int((sent_s + e2e_s - first_s) / wall_s * windows))
        counts[window] += tokens if key == "output_tokens_per_s" else 1
    return [count * windows / wall_s for count in counts]


class LiveFigures:
    """Percentiles of the last requests, and the number of errors so far."""

    def __init__(self) -> None:
        self._last: deque[RequestOutcome] = deque(maxlen=_WINDOW)
        self._errors = 0

    def take(self, outcome: RequestOutcome) -> None:
        """Count one more outcome."""
        if outcome.error:
            self._errors += 1
        else:
            self._last.append(outcome)

    def describe(self) -> str:
        """The figures in a few words."""
        last = list(self._last)
        ttft = sorted(outcome.ttft_s for outcome in last if outcome.ttft_s is not None)
        tpot = sorted(outcome.tpot_s for outcome in last if outcome.tpot_s is not None)
        parts = [f"{name} {_pair(values)}" for name, values in (("TTFT", ttft), ("TPOT", tpot)) if values]
        if self._errors:
            parts.append(f"{self._errors} errors")
        return ", ".join(parts)


def _pair(ordered: list[float]) -> str:
    median, high = (1000 * percentile(ordered, percent) for percent in (50, 99))
    return f"p50 {median:.1f} p99 {high:.1f} ms"

"""What a client saw of one completion, whichever server sent it. Pure.

Servers differ in what their events carry, so that a token is counted by the usage at the end, and an arrival by any
event with text or token ids.
"""

from __future__ import annotations

from itertools import accumulate

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.stream import RequestFailed


def check_length(outcome: RequestOutcome, tokens: int) -> RequestOutcome:
    """`outcome`, if it has exactly `tokens` tokens. Raises: RequestFailed."""
    if outcome.error:
        raise RequestFailed(outcome.detail, outcome.error)
    if outcome.output_tokens != tokens or outcome.ttft_s is None:
        raise RequestFailed(f"{outcome.output_tokens} tokens came instead of {tokens}", "length")
    return outcome


def arrival_times(outcome: RequestOutcome) -> list[float]:
    """Times at which tokens arrived; several events of one read are one arrival."""
    if outcome.ttft_s is None:
        return []
    return sorted(set(accumulate(outcome.itl_s, initial=outcome.sent_s + outcome.ttft_s)))


def decode_rate(outcome: RequestOutcome) -> float:
    """Tokens/s after the first arrival."""
    times = arrival_times(outcome)
    return (outcome.output_tokens - 1) / (times[-1] - times[0])


def answered_until(outcomes: list[RequestOutcome | None], until_s: float) -> int:
    """How many had their first token by then; None: the request failed."""
    return sum(1 for o in outcomes if o is not None and o.ttft_s is not None and o.sent_s + o.ttft_s <= until_s)

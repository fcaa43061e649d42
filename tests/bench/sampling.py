"""What masks, penalties and log-probabilities add to a decode step: a node's rounds with them against those without."""

from __future__ import annotations

from typing import Any

from bench.results import Result, Target, median
from bench.session import Session

_BATCH, _PROMPT = 32, 256
_WORDS = "start: /[a-z ]+/"
_PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grammar": (_WORDS, {}),
    "penalties": ("", _PENALTIES),
    "logprobs=5": ("", {"logprobs": 5}),
    "all three": (_WORDS, {**_PENALTIES, "logprobs": 5}),
}


def run(session: Session) -> Result:
    """Rounds of 32 sequences, drawn greedily and at random; alternating pairs."""
    result = Result("sampling")
    steps, repeats = session.repeats(20, 4), session.repeats(7)

    def step_s(grammar: str, **sampling: Any) -> float:
        return float(
            session.plain.call("sampled", batch=_BATCH, prompt=_PROMPT, steps=steps, grammar=grammar, sampling=sampling)
        )

    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        step_s("", temperature=temperature)
        for case, (grammar, sampling) in _CASES.items():
            step_s(grammar, temperature=temperature, **sampling)
            pairs = [
                (step_s("", temperature=temperature), step_s(grammar, temperature=temperature, **sampling))
                for _ in range(repeats)
            ]
            result.details[f"{name}, {case}"] = pairs
            result.add(
                f"batch {_BATCH}, {name}, {case}: time of a step added",
                100 * median([having / without - 1 for without, having in pairs]),
                "%",
                target=Target(10, at_most=True),
                note=f"of {1e3 * median([without for without, _ in pairs]):.1f} ms",
            )
    return result

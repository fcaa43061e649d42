"""What the engine adds to the model's own time, per step."""

from __future__ import annotations

from typing import Any

from bench.results import Result, Target, median
from bench.session import Session

_BATCH, _PROMPT = 8, 128


def run(session: Session) -> Result:
    """A decode node's rounds at batch 8: with the real model, and with one that computes nothing."""
    result = Result("engine_overhead")
    plain = session.plain
    repeats = session.repeats(5, 2)
    real_steps, stub_steps = session.repeats(40, 8), session.repeats(2000, 100)

    def measure(stub: bool, steps: int) -> list[dict[str, Any]]:
        return [plain.call("overhead", batch=_BATCH, prompt=_PROMPT, steps=steps, stub=stub) for _ in range(repeats)]

    real, stub = measure(False, real_steps), measure(True, stub_steps)
    shares = [1 - run["forward_s"] / run["wall_s"] for run in real]
    step_ms = median([1e3 * run["wall_s"] / run["steps"] for run in real])
    result.add(
        f"1 - forward / step, batch {_BATCH}",
        100 * median(shares),
        "%",
        target=Target(5, at_most=True),
        note=f"a step takes {step_ms:.1f} ms; forward is tensors, model and sampling",
    )
    beside = [1e6 * (run["wall_s"] - run["forward_s"]) / run["steps"] for run in real]
    result.add(f"beside forward, per step, batch {_BATCH}", median(beside), "us")
    result.add(
        f"a step with a stub model, batch {_BATCH}", median([1e6 * run["wall_s"] / run["steps"] for run in stub]), "us"
    )
    result.details = {"real": real, "stub": stub}
    return result

"""Runs plans against a server, with live progress: what the commands of `kvrelay load` share."""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

from common.base.errors import ConfigError
from common.base.progress import LiveProgress
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.processes import LoadFailed, run_on_children
from kvrelay.load.runner import LoadRunner
from kvrelay.load.stream import RequestFailed, run
from kvrelay.load.summary import LiveFigures
from kvrelay.load.workload import Workload
from kvrelay.served_models import base_url, list_models

_FALLBACK_VOCAB = 32_000


def ask_server(plan: LoadPlan) -> LoadPlan:
    """Complete `plan` with what only the server knows: model, vocabulary size, context length. Its URL may end in /v1.

    Raises: AdminUnreachable (exit code 3) if no server there lists models, ConfigError if it does not serve this one.
    """
    url = base_url(plan.url)
    models = list_models(url, plan.api_key)
    if plan.model and plan.model not in models:
        raise ConfigError(f"{url} has no model {plan.model!r}, it has {', '.join(models)}")
    name = plan.model or next(iter(models))
    model = models[name]
    vocab_size = plan.vocab_size or int(model.get("vocab_size") or _FALLBACK_VOCAB)
    max_len = int(model.get("max_model_len") or 0)
    longest = plan.prefix_tokens + plan.longest_tokens + plan.output_tokens
    if plan.longest_tokens and max_len and longest > max_len:
        raise ConfigError(f"--longest-tokens is too much: {longest} tokens with the rest, and {name} has {max_len}")
    return dataclasses.replace(plan, url=url, model=name, vocab_size=vocab_size, max_len=max_len)


class LoadRun(NamedTuple):
    """All outcomes of a run by job number; if `interrupted` by Ctrl-C, those so far."""

    outcomes: list[RequestOutcome]
    interrupted: bool


def measure(workload: Workload, title: str) -> LoadRun:
    """Warm up and run, and show the progress. Raises: LoadFailed if the warm-up or a process failed."""
    plan, figures = workload.plan, LiveFigures()
    outcomes: list[RequestOutcome] = []
    duration_s = 0.0 if plan.trace else plan.duration_s
    interrupted = False
    with LiveProgress(title, total=workload.total, duration_s=duration_s, details=figures.describe) as progress:

        def take(outcome: RequestOutcome) -> None:
            outcomes.append(outcome)
            figures.take(outcome)
            progress.advance()

        # Each runner has one event loop, to which its connections belong.
        try:
            if plan.warmup:
                run(LoadRunner(workload, 0, take).warm_up())
        except RequestFailed as error:
            raise LoadFailed(str(error)) from error
        try:
            if plan.processes == 1:
                run(LoadRunner(workload, 0, take).run(time.perf_counter()))
            else:
                run(run_on_children(plan, take))
        except KeyboardInterrupt:  # the first one ends the run but keeps the report
            interrupted = True
    return LoadRun(sorted(outcomes, key=lambda outcome: outcome.number), interrupted)

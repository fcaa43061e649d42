"""The options that say what to send, shared by the commands of `kvrelay load`: each is a field of `LoadPlan`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from common.base.errors import ConfigError
from common.config.sources import ENV_PREFIX
from kvrelay.load.plan import LoadPlan
from kvrelay.load.traces import TRACE_BLOCK
from kvrelay.served_models import default_url


def _option(kind: Any, name: str, help: str, panel: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(name, help=help, rich_help_panel=panel, **more)]


_URL = "Server URL; by default that of this user's only `kvrelay up`, else port 8000 on this host."
_LONGEST = "Long contexts: unique tokens vary log-uniformly from --suffix-tokens to this; 0: they do not vary."
_SEED = (
    "Random seed for prompts and arrivals; by default a new one, so that no prompt is in the server's cache already."
)
_RAMP = "Rate at the start, which grows linearly to --rate within --duration."

MAX_RATE, MAX_SECONDS = 1e5, 1e8
_MAX_COUNT, _MAX_TOKENS = 100_000, 10_000_000
"""Upper bound of numbers: with more, a run would not end, or would take all memory before its first request."""
_MAX_SEED = 2**31
"""Requests have seeds derived from it, which must fit into 64 bits."""

_OPTIONS = {
    "url": _option(str | None, "--url", _URL, "Server"),
    "model": _option(str, "--model", "Model name; by default the first that the server lists.", "Server"),
    "api_key": _option(str, "--api-key", "Bearer token.", "Server", envvar=ENV_PREFIX + "API_KEY"),
    "concurrency": _option(
        int, "--concurrency", "Closed loop: number of concurrent requests or sessions.", "Pace", min=0, max=_MAX_COUNT
    ),
    "rate": _option(
        float, "--rate", "Open loop: mean number of requests or sessions per second.", "Pace", min=0.0, max=MAX_RATE
    ),
    "burstiness": _option(
        float,
        "--burstiness",
        "Shape of the gaps: 1 is Poisson, lower is burstier, higher more even.",
        "Pace",
        min=0.01,
        max=1e6,
    ),
    "burst_size": _option(
        int, "--burst-size", "Open loop: requests that arrive at a time.", "Pace", min=1, max=_MAX_COUNT
    ),
    "ramp_from": _option(float | None, "--ramp-from", _RAMP, "Pace", min=0.0, max=MAX_RATE),
    "requests": _option(int, "--requests", "Total number of requests, or of sessions.", "Pace", min=0),
    "duration_s": _option(
        float, "--duration", "Seconds during which requests are started.", "Pace", min=0.0, max=MAX_SECONDS
    ),
    "warmup": _option(
        int, "--warmup", "Requests sent before the measurement and not counted.", "Pace", min=0, max=_MAX_COUNT
    ),
    "timeout_s": _option(float, "--timeout", "Maximum seconds per request.", "Pace", min=0.001, max=MAX_SECONDS),
    "processes": _option(int, "--processes", "Number of sending processes.", "Pace", min=1, max=64),
    "chat": _option(
        bool, "--chat", "Send text to /v1/chat/completions instead of token ids to /v1/completions.", "Prompts"
    ),
    "prefixes": _option(int, "--prefixes", "Number of different shared prefixes.", "Prompts", min=1, max=_MAX_TOKENS),
    "prefix_tokens": _option(int, "--prefix-tokens", "Tokens per prefix.", "Prompts", min=0, max=_MAX_TOKENS),
    "suffix_tokens": _option(
        int, "--suffix-tokens", "Unique tokens at the end of each prompt.", "Prompts", min=0, max=_MAX_TOKENS
    ),
    "output_tokens": _option(int, "--output-tokens", "Tokens per answer.", "Prompts", min=1, max=_MAX_TOKENS),
    "longest_tokens": _option(int, "--longest-tokens", _LONGEST, "Prompts", min=0, max=_MAX_TOKENS),
    "turns": _option(
        int,
        "--turns",
        "Chat sessions of this many requests, each with all before it.",
        "Prompts",
        min=1,
        max=_MAX_COUNT,
    ),
    "think_s": _option(
        float, "--think-time", "Mean seconds between the turns of a session.", "Prompts", min=0.0, max=MAX_SECONDS
    ),
    "tools": _option(bool, "--tools", "Agents: every turn but the last one of a session calls a tool.", "Prompts"),
    "vocab_size": _option(
        int,
        "--vocab-size",
        "Token ids are below this; 0: the size that the server reports.",
        "Prompts",
        min=0,
        max=2**31,
    ),
    "seed": _option(int | None, "--seed", _SEED, "Prompts", min=-_MAX_SEED, max=_MAX_SEED),
    "temperature": _option(float, "--temperature", "Sampling temperature; 0 is greedy.", "Prompts", min=0.0, max=2.0),
    "ignore_eos": _option(
        bool,
        "--ignore-eos/--respect-eos",
        "Whether answers have all of their tokens whatever the model says.",
        "Prompts",
    ),
    "trace": _option(str, "--trace", "Trace to replay: Mooncake's JSON lines or Azure's CSV.", "Trace"),
    "scale": _option(int, "--scale", f"Divide all lengths by this; must divide {TRACE_BLOCK}.", "Trace", min=1),
    "rate_scale": _option(float, "--rate-scale", "Speed-up of the trace's arrival times.", "Trace", min=1e-6, max=1e6),
}
_DEFAULTS: dict[str, Any] = {"url": None, "model": "", "vocab_size": 0, "seed": None}
"""Defaults that differ from `LoadPlan`'s: the server is asked for these, and the seed is drawn."""


def takes_plan(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn `function(plan, ...)` into a command whose options are the fields of `LoadPlan`, then its own.

    `without`: the fields that the command sets itself. A plan that contradicts itself is wrong usage.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            fields: dict[str, Any] = {name: given.pop(name) for name in names}
            fields["url"] = fields["url"] or default_url()
            if fields["seed"] is None:
                fields["seed"] = secrets.randbelow(_MAX_SEED)
            function(LoadPlan(**fields), **given)

        defaults = {field.name: field.default for field in dataclasses.fields(LoadPlan)} | _DEFAULTS
        names = [name for name in _OPTIONS if name not in without]
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "plan"
        ]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=_OPTIONS[name])
            for name in names
        ]
        command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shared, *own]}
        return command

    return wrap


def check_usage(plan: LoadPlan) -> None:
    """Raises: typer.BadParameter for a plan that contradicts itself."""
    try:
        plan.check()
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None

"""The plan of one load run: what to send where, how fast and how long. Sent to the processes of the run as JSON."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any

from common.base.errors import ConfigError

TRACE_BLOCK = 512
"""Tokens of one block, which has one hash id in a Mooncake trace."""
MIN_RATE = 1e-6
"""Lowest rate of an open loop: one request in eleven days."""
MAX_RATE, MAX_SECONDS, _MAX_COUNT, _MAX_TOKENS = 1e5, 1e8, 100_000, 10_000_000
"""Upper bounds: with more, a run would not end, or would take all memory before its first request."""
MAX_SEED = 2**31
"""Requests have seeds derived from it, which must fit into 64 bits."""


def _option(panel: str, help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option of `kvrelay load`: its metadata are arguments of `typer.Option`."""
    return field(default=default, metadata={"help": help, "rich_help_panel": panel, **more})


_server, _pace, _prompts, _trace = (partial(_option, panel) for panel in ("Server", "Pace", "Prompts", "Trace"))


@dataclass(frozen=True)
class LoadPlan:
    """Everything that the run depends on, except the server."""

    url: str = _server("Server URL; by default that of this user's only `kvrelay up`, else port 8000 on this host.")
    model: str = _server("Model name; by default the first that the server lists.")
    api_key: str = _server("Bearer token.", "", envvar="KVRELAY_API_KEY")
    concurrency: int = _pace("Closed loop: number of concurrent requests or sessions.", 0, min=0, max=_MAX_COUNT)
    """0: open loop, by `rate` or by the trace's times."""
    rate: float = _pace("Open loop: mean number of requests or sessions per second.", 0.0, min=0.0, max=MAX_RATE)
    burstiness: float = _pace(
        "Shape of the gaps: 1 is Poisson, lower is burstier, higher more even.", 1.0, min=0.01, max=1e6
    )
    burst_size: int = _pace("Open loop: requests that arrive at a time.", 1, min=1, max=_MAX_COUNT)
    ramp_from: float | None = _pace(
        "Rate at the start, which grows linearly to --rate within --duration.", None, min=0.0, max=MAX_RATE
    )
    requests: int = _pace("Total number of requests, or of sessions.", 0, min=0)
    """0: until `duration_s`, or the whole trace."""
    duration_s: float = _pace("Seconds during which requests are started.", 0.0, min=0.0, max=MAX_SECONDS)
    warmup: int = _pace("Requests sent before the measurement and not counted.", 0, min=0, max=_MAX_COUNT)
    timeout_s: float = _pace("Maximum seconds per request.", 600.0, min=0.001, max=MAX_SECONDS)
    chat: bool = _prompts("Send text to /v1/chat/completions instead of token ids to /v1/completions.", False)
    prefixes: int = _prompts("Number of different shared prefixes.", 8, min=1, max=_MAX_TOKENS)
    prefix_tokens: int = _prompts("Tokens per prefix.", 256, min=0, max=_MAX_TOKENS)
    suffix_tokens: int = _prompts("Unique tokens at the end of each prompt.", 64, min=0, max=_MAX_TOKENS)
    output_tokens: int = _prompts("Tokens per answer.", 32, min=1, max=_MAX_TOKENS)
    longest_tokens: int = _prompts(
        "Long contexts: unique tokens vary log-uniformly from --suffix-tokens to this; 0: they do not vary.",
        0,
        min=0,
        max=_MAX_TOKENS,
    )
    turns: int = _prompts("Chat sessions of this many requests, each with all before it.", 1, min=1, max=_MAX_COUNT)
    think_s: float = _prompts(
        "Mean seconds between the turns of a session.", 0.0, flag="--think-time", min=0.0, max=MAX_SECONDS
    )
    tools: bool = _prompts("Agents: every turn but the last one of a session calls a tool.", False)
    vocab_size: int = _prompts(
        "Token ids are below this; 0: the size that the server reports.", 32_000, min=0, max=2**31
    )
    max_len: int = 0
    """Longer requests of a trace are skipped; 0: no limit."""
    trace: str = _trace("Trace to replay: Mooncake's JSON lines or Azure's CSV.", "")
    scale: int = _trace(f"Divide all lengths by this; must divide {TRACE_BLOCK}.", 32, min=1)
    rate_scale: float = _trace("Speed-up of the trace's arrival times.", 1.0, min=1e-6, max=1e6)
    seed: int = _prompts(
        "Random seed for prompts and arrivals; by default a new one, so that no prompt is in the server's cache already.",
        0,
        min=-MAX_SEED,
        max=MAX_SEED,
    )
    temperature: float = _prompts("Sampling temperature; 0 is greedy.", 0.0, min=0.0, max=2.0)
    ignore_eos: bool = _prompts(
        "Whether answers have all of their tokens whatever the model says.", True, flag="--ignore-eos/--respect-eos"
    )
    processes: int = _pace("Number of sending processes.", 1, min=1, max=64)

    @property
    def sends_chats(self) -> bool:
        return self.chat or self.turns > 1

    def check(self) -> None:
        """Raises: ConfigError for contradictory settings."""
        self._check_pace()
        if self.trace and self.sends_chats:
            raise ConfigError("a trace is replayed with token ids: remove --chat and --turns")
        if self.trace and (self.scale < 1 or TRACE_BLOCK % self.scale):
            raise ConfigError(f"--scale must divide {TRACE_BLOCK}, {self.scale} does not")
        if not self.prefix_tokens + self.suffix_tokens:
            raise ConfigError("the prompt is empty: give --prefix-tokens or --suffix-tokens")
        if 0 < self.longest_tokens < self.suffix_tokens:
            raise ConfigError(f"--longest-tokens is less than --suffix-tokens, {self.suffix_tokens}")
        if self.turns == 1 and (self.tools or self.think_s):
            raise ConfigError("--tools and --think-time are for sessions: give --turns")

    def _check_pace(self) -> None:
        """Raises: ConfigError."""
        if self.rate and self.concurrency:
            raise ConfigError("give --rate (open loop) or --concurrency (closed loop), not both")
        if 0 < self.rate < MIN_RATE:
            raise ConfigError(f"--rate must be at least {MIN_RATE:g}, or 0 for a closed loop")
        if self.rate and self.trace:
            raise ConfigError("a trace has its own arrival times: speed them up with --rate-scale instead of --rate")
        if self.concurrency and self.processes > self.concurrency:
            # A process without a worker would never send its share of the jobs.
            raise ConfigError(
                f"{self.processes} processes cannot share --concurrency {self.concurrency}: use fewer processes"
            )
        if not self.trace and not self.rate and not self.concurrency:
            raise ConfigError("give --rate (open loop) or --concurrency (closed loop)")
        if not self.trace and not self.requests and not self.duration_s:
            raise ConfigError("give --requests or --duration: the run needs an end")
        if not self.rate and (self.burst_size > 1 or self.ramp_from is not None):
            raise ConfigError("--burst-size and --ramp-from are for the open loop: give --rate")
        if self.ramp_from is not None and not self.duration_s:
            raise ConfigError("--ramp-from needs --duration, in which the rate grows to --rate")

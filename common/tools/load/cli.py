"""`kvrelay load`: benchmarks any server of the OpenAI API."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base.errors import ConfigError
from common.cli import check_writable, flowing, run_checked
from common.config.sources import ENV_PREFIX
from common.tools.admin.client import AdminUsage
from common.tools.load.jobs import TRACE_BLOCK
from common.tools.load.plan import LoadPlan, Workload
from common.tools.load.processes import LoadFailed, run_load
from common.tools.load.summary import summarise
from common.tools.served_models import default_url, list_models

_HELP = """Benchmark a server of the OpenAI API: send requests, report latency, throughput and goodput.

[bold]Closed loop:[/bold] kvrelay load run --concurrency 16 --requests 500

[bold]Open loop, Poisson:[/bold] kvrelay load run --rate 20 --duration 60 --slo-ttft 0.5 --slo-tpot 0.05

[bold]Trace replay:[/bold] kvrelay load run --trace conversation_trace.jsonl --scale 32 --rate-scale 2

Exit codes: 0 done, 1 more errors than --max-error-rate or the run failed, 2 wrong usage, 3 no answer.
"""
_FALLBACK_VOCAB = 32_000

app = typer.Typer(
    name="load",
    help=flowing(_HELP),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def _group() -> None:
    """Keep `run` a subcommand although it is the only one."""


def _option(name: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


Url = Annotated[
    str | None,
    _option(
        "--url", "Server URL; by default that of this user's only `kvrelay up`, else port 8000 on this host.", "Server"
    ),
]
Model = Annotated[str | None, _option("--model", "Model name; by default the first that the server lists.", "Server")]
ApiKey = Annotated[str, _option("--api-key", "Bearer token.", "Server", envvar=ENV_PREFIX + "API_KEY")]
Concurrency = Annotated[int, _option("--concurrency", "Closed loop: number of concurrent requests.", "Pace", min=0)]
Rate = Annotated[float, _option("--rate", "Open loop: mean request rate per second.", "Pace", min=0.0)]
Burstiness = Annotated[
    float,
    _option(
        "--burstiness", "Shape of the gaps: 1 is Poisson, lower is burstier, higher is more even.", "Pace", min=0.01
    ),
]
Requests = Annotated[int, _option("--requests", "Total number of requests.", "Pace", min=0)]
Duration = Annotated[float, _option("--duration", "Seconds during which requests are started.", "Pace", min=0.0)]
Warmup = Annotated[int, _option("--warmup", "Requests sent before the measurement and not counted.", "Pace", min=0)]
Timeout = Annotated[float, _option("--timeout", "Maximum seconds per request.", "Pace", min=0.001)]
Processes = Annotated[int, _option("--processes", "Number of sending processes.", "Pace", min=1, max=64)]
Chat = Annotated[
    bool, _option("--chat", "Send text to /v1/chat/completions instead of token ids to /v1/completions.", "Prompts")
]
Prefixes = Annotated[int, _option("--prefixes", "Number of different shared prefixes.", "Prompts", min=1)]
PrefixTokens = Annotated[int, _option("--prefix-tokens", "Tokens per prefix.", "Prompts", min=0)]
SuffixTokens = Annotated[int, _option("--suffix-tokens", "Unique tokens at the end of each prompt.", "Prompts", min=0)]
OutputTokens = Annotated[int, _option("--output-tokens", "Tokens per answer.", "Prompts", min=1)]
Vocab = Annotated[
    int,
    _option(
        "--vocab-size", "Token ids are below this; 0: the vocabulary size that the server reports.", "Prompts", min=0
    ),
]
Seed = Annotated[int, _option("--seed", "Random seed for prompts and arrivals.", "Prompts")]
Temperature = Annotated[
    float, _option("--temperature", "Sampling temperature; 0 is greedy.", "Prompts", min=0.0, max=2.0)
]
RespectEos = Annotated[bool, _option("--respect-eos", "Let the model end answers early.", "Prompts")]
Trace = Annotated[str, _option("--trace", "Mooncake trace (JSON lines) to replay.", "Trace")]
Scale = Annotated[int, _option("--scale", f"Divide all lengths by this; must divide {TRACE_BLOCK}.", "Trace", min=1)]
RateScale = Annotated[float, _option("--rate-scale", "Speed-up of the trace's arrival times.", "Trace", min=1e-6)]
SloTtft = Annotated[
    float | None, _option("--slo-ttft", "Goodput objective: maximum seconds to the first token.", "Results")
]
SloTpot = Annotated[
    float | None, _option("--slo-tpot", "Goodput objective: maximum seconds per later token.", "Results")
]
MaxErrors = Annotated[
    float,
    _option("--max-error-rate", "Exit with code 1 if a larger share of requests fails.", "Results", min=0.0, max=1.0),
]
JsonFile = Annotated[Path | None, _option("--json", "Write results to this JSON file.", "Results", metavar="FILE")]
Details = Annotated[bool, _option("--details", "Include every request in that file.", "Results")]


@app.command("run")
def run(
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = "",
    concurrency: Concurrency = 0,
    rate: Rate = 0.0,
    burstiness: Burstiness = 1.0,
    requests: Requests = 0,
    duration: Duration = 0.0,
    warmup: Warmup = 0,
    timeout: Timeout = 600.0,
    processes: Processes = 1,
    chat: Chat = False,
    prefixes: Prefixes = 8,
    prefix_tokens: PrefixTokens = 256,
    suffix_tokens: SuffixTokens = 64,
    output_tokens: OutputTokens = 32,
    vocab_size: Vocab = 0,
    seed: Seed = 0,
    temperature: Temperature = 0.0,
    respect_eos: RespectEos = False,
    trace: Trace = "",
    scale: Scale = 32,
    rate_scale: RateScale = 1.0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    max_error_rate: MaxErrors = 0.01,
    json_file: JsonFile = None,
    details: Details = False,
) -> None:
    """Send requests (closed loop, open loop or a trace); print latencies, prefix hits, errors and goodput."""
    plan = LoadPlan(
        url=url or default_url(),
        model=model or "",
        api_key=api_key,
        chat=chat,
        concurrency=concurrency,
        rate=rate,
        burstiness=burstiness,
        requests=requests,
        duration_s=duration,
        warmup=warmup,
        timeout_s=timeout,
        prefixes=prefixes,
        prefix_tokens=prefix_tokens,
        suffix_tokens=suffix_tokens,
        output_tokens=output_tokens,
        vocab_size=vocab_size,
        trace=trace,
        scale=scale,
        rate_scale=rate_scale,
        seed=seed,
        temperature=temperature,
        ignore_eos=not respect_eos,
        processes=processes,
    )
    _run_plan(plan, (slo_ttft, slo_tpot), max_error_rate, json_file, details)


def _run_plan(
    plan: LoadPlan, slo: tuple[float | None, float | None], max_error_rate: float, json_file: Path | None, details: bool
) -> None:
    """Check and run the plan; end the process with the exit code that `--help` lists."""
    try:
        plan.check()
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None

    def act() -> None:
        try:
            summary = _run(_ask_server(plan), slo, json_file, details)
        except ConfigError as error:
            raise AdminUsage(error.message) from error
        failed = summary["error_rate"]
        if failed > max_error_rate:
            raise LoadFailed(
                f"{100 * failed:.1f} % of the requests failed, more than the allowed {100 * max_error_rate:g} %"
            )

    run_checked(act)


def _run(
    plan: LoadPlan, slo: tuple[float | None, float | None], json_file: Path | None, details: bool
) -> dict[str, Any]:
    from common.tools.admin.show import console
    from common.tools.load import show

    workload = Workload(plan)
    if json_file is not None:
        check_writable(json_file)
    began = time.time()
    with show.progress() as progress:
        task = progress.add_task(plan.model, total=workload.total)
        outcomes = run_load(plan, workload, lambda outcome: progress.advance(task))
    summary = summarise(outcomes, *slo)
    try:
        if json_file is not None:
            config = {key: value for key, value in dataclasses.asdict(plan).items() if key != "api_key"}
            whole: dict[str, Any] = {"began": began, "config": config, "left_out": workload.left_out}
            whole["summary"] = summary
            if details:
                whole["requests"] = [outcome.as_json() for outcome in outcomes]
            json_file.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise LoadFailed(f"cannot write {json_file}: {error.strerror}") from None
    finally:  # print even if the file failed: a run may have taken hours
        console().print(show.report(summary, workload.left_out))
    return summary


def _ask_server(plan: LoadPlan) -> LoadPlan:
    """Complete `plan` with what only the server knows: model, vocabulary size, context length.

    Raises: AdminUnreachable (exit code 3) if no server there lists models, ConfigError if it does not serve this one.
    """
    models = list_models(plan.url, plan.api_key)
    if plan.model and plan.model not in models:
        raise ConfigError(f"{plan.url} has no model {plan.model!r}, it has {', '.join(models)}")
    name = plan.model or next(iter(models))
    model = models[name]
    vocab_size = plan.vocab_size or int(model.get("vocab_size") or _FALLBACK_VOCAB)
    return dataclasses.replace(plan, model=name, vocab_size=vocab_size, max_len=int(model.get("max_model_len") or 0))

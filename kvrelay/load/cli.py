"""`kvrelay load`: benchmarks any server of the OpenAI API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base.errors import ConfigError
from common.config.cli import check_writable, command_group
from kvrelay.admin.client import AdminUnreachable, AdminUsage
from kvrelay.load.measure import ask_server, measure
from kvrelay.load.options import check_usage, takes_plan
from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import MAX_RATE, MAX_SECONDS, MIN_RATE, LoadPlan
from kvrelay.load.processes import LoadFailed
from kvrelay.load.results import read_result, run_result, write
from kvrelay.load.workload import Workload
from kvrelay.served_models import list_models

_HELP = """Benchmark a server of the OpenAI API: send requests, report latency, throughput and goodput.

[bold]Closed loop:[/bold] kvrelay load run --concurrency 16 --requests 500

[bold]Open loop, Poisson:[/bold] kvrelay load run --rate 20 --duration 60 --slo-ttft 0.5 --slo-tpot 0.05

[bold]Sessions:[/bold] kvrelay load run --concurrency 8 --requests 20 --turns 6 --think-time 2

[bold]Trace replay:[/bold] kvrelay load run --trace conversation_trace.jsonl --scale 32 --rate-scale 2

[bold]Highest rate inside the objectives:[/bold] kvrelay load sweep --slo-ttft 0.5 --slo-tpot 0.05 --html report.html

[bold]Two servers:[/bold] kvrelay load ab --url http://a:8000 --url-b http://b:8000 --concurrency 8 --requests 100

Exit codes: 0 done, 1 more errors than --max-error-rate or the run failed, 2 wrong usage, 3 no answer.
"""

app = command_group("load", _HELP)


def _result_option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel="Results", **more)


SloTtft = Annotated[
    float | None,
    _result_option("--slo-ttft", "Goodput objective: maximum seconds to the first token.", min=1e-6, max=MAX_SECONDS),
]
SloTpot = Annotated[
    float | None,
    _result_option("--slo-tpot", "Goodput objective: maximum seconds per later token.", min=1e-6, max=MAX_SECONDS),
]
MaxErrors = Annotated[
    float,
    _result_option("--max-error-rate", "Exit with code 1 if a larger share of requests fails.", min=0.0, max=1.0),
]
JsonFile = Annotated[Path | None, _result_option("--json", "Write results to this JSON file.", metavar="FILE")]
HtmlFile = Annotated[Path | None, _result_option("--html", "Write a report with charts to this file.", metavar="FILE")]
Details = Annotated[bool, _result_option("--details", "Include everything about every request in the JSON file.")]
Result = Annotated[Path, typer.Argument(metavar="FILE", help="Results that --json wrote.")]


@app.command("run")
@takes_plan()
def run(
    plan: LoadPlan,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    max_error_rate: MaxErrors = 0.01,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    details: Details = False,
) -> None:
    """Send requests (closed loop, open loop or a trace); print latencies, prefix hits, errors and goodput."""
    check_usage(plan)
    workload = _ready(plan, json_file, html_file)
    plan, began = workload.plan, time.time()
    outcomes, interrupted = measure(workload, plan.model)
    result = run_result(plan, [outcomes], (slo_ttft, slo_tpot), began=began, left_out=workload.left_out)
    if details:
        result["requests"] = [dataclasses.asdict(outcome) for outcome in outcomes]
    _finish(result, json_file, html_file)
    if not outcomes and not interrupted:
        raise LoadFailed("no request was due within --duration: make it longer, or --rate higher")
    failed = result["summary"]["error_rate"]
    if failed > max_error_rate:
        raise LoadFailed(
            f"{100 * failed:.1f} % of the requests failed, more than the allowed {100 * max_error_rate:g} %"
        )


@app.command("sweep")
@takes_plan(without=("rate", "concurrency", "ramp_from", "requests", "trace", "scale", "rate_scale", "duration_s"))
def sweep(
    plan: LoadPlan,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    duration: Annotated[
        float,
        typer.Option("--duration", help="Seconds at each rate.", rich_help_panel="Pace", min=0.1, max=MAX_SECONDS),
    ] = 20.0,
    rates: Annotated[
        str, typer.Option("--rates", help="Try only these rates, such as 1,2,4.", rich_help_panel="Pace")
    ] = "",
    first_rate: Annotated[
        float,
        typer.Option("--first-rate", help="Rate that is tried first.", rich_help_panel="Pace", min=0.01, max=MAX_RATE),
    ] = 1.0,
    highest_rate: Annotated[
        float,
        typer.Option(
            "--highest-rate", help="No rate above this is tried.", rich_help_panel="Pace", min=0.01, max=MAX_RATE
        ),
    ] = 1000.0,
    precision: Annotated[
        float, _result_option("--precision", "Find the highest rate to within this share of it.", min=0.01, max=1.0)
    ] = 0.1,
    attainment: Annotated[
        float, _result_option("--attainment", "Share of requests that must be inside the objectives.", min=0.0, max=1.0)
    ] = 0.9,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Find the highest rate whose requests meet the objectives; print the goodput at each rate that was tried."""
    from kvrelay.load import sweep as sweeping

    if slo_ttft is None and slo_tpot is None:
        raise typer.BadParameter("give --slo-ttft or --slo-tpot: what is the highest rate to be inside of?")
    base = dataclasses.replace(plan, rate=first_rate, duration_s=duration)
    check_usage(base)
    wanted = _rates(rates)

    def measure_one(at_rate: LoadPlan) -> Sequence[RequestOutcome]:
        outcomes, interrupted = measure(Workload(at_rate), f"{at_rate.rate:.3g} requests/s")
        if interrupted:
            raise KeyboardInterrupt
        return outcomes

    ready = _ready(base, json_file, html_file).plan
    result = sweeping.sweep(
        sweeping.SweepPlan(ready, (slo_ttft, slo_tpot), attainment, wanted, first_rate, precision, highest_rate),
        measure_one,
        ask=lambda: list_models(ready.url, ready.api_key),
        on_left=partial(_say_left, duration),
        keep=partial(_write_files, json_file, html_file),
    )
    _finish(result, json_file, html_file)
    if result["failure"]:
        raise AdminUnreachable(result["failure"])


@app.command("ab")
@takes_plan()
def ab(
    plan: LoadPlan,
    url_b: Annotated[str, typer.Option("--url-b", help="The other server, B.", rich_help_panel="Server")],
    model_b: Annotated[str, typer.Option("--model-b", help="Its model.", rich_help_panel="Server")] = "",
    rounds: Annotated[
        int, _result_option("--rounds", "Runs of each server, one after the other.", min=2, max=10_000)
    ] = 6,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    json_file: JsonFile = None,
    json_b: Annotated[Path | None, _result_option("--json-b", "Write the results of B to this file.")] = None,
    html_file: HtmlFile = None,
) -> None:
    """Run the same load on two servers in turns (A B B A ...); print how they differ, with 95 % intervals."""
    check_usage(plan)
    plans = [_ready(plan, json_file, json_b, html_file).plan]
    plans.append(_ready(dataclasses.replace(plan, url=url_b, model=model_b)).plan)
    began, slo = time.time(), (slo_ttft, slo_tpot)
    done = _interleaved(plans, rounds)
    pair = secrets.token_hex(4)
    a, b = (run_result(side, of_side, slo, began=began, pair=pair) for side, of_side in zip(plans, done, strict=True))
    _write_files(json_file, None, a)
    _write_files(json_b, None, b)
    _finish(_comparison(a, b), None, html_file)


@app.command("compare")
def compare(
    a: Result,
    b: Result,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Print how run B differs from run A, with 95 % intervals; both sides of `ab` are compared round by round."""
    with _config_errors_as_usage():
        _finish(_comparison(read_result(a), read_result(b)), json_file, html_file)


@app.command("report")
def report(file: Result, page: Annotated[Path, typer.Argument(metavar="HTML", help="The report to write.")]) -> None:
    """Write results as one HTML page with charts, which needs no network and no scripts."""
    from kvrelay.load.report.page import render

    with _config_errors_as_usage():
        write(page, render(read_result(file)))


def _rates(text: str) -> tuple[float, ...]:
    """Raises: typer.BadParameter."""
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"--rates is a list of numbers such as 1,2,4, not {text!r}") from None
    if not all(MIN_RATE <= rate <= MAX_RATE for rate in rates):
        raise typer.BadParameter(f"--rates must be between {MIN_RATE:g} and {MAX_RATE:g}")
    return rates


@contextlib.contextmanager
def _config_errors_as_usage() -> Generator[None]:
    """Raises: AdminUsage in place of ConfigError: a wrong file or plan is wrong usage."""
    try:
        yield
    except ConfigError as error:
        raise AdminUsage(error.message) from error


@_config_errors_as_usage()
def _ready(plan: LoadPlan, *files: Path | None) -> Workload:
    """The jobs of the plan, completed by what the server says; `files` can be written. Raises: AdminUsage."""
    ready = ask_server(plan)
    for path in files:
        if path is not None:
            check_writable(path)
    return Workload(ready)


def _interleaved(
    plans: Sequence[LoadPlan], rounds: int
) -> tuple[list[list[RequestOutcome]], list[list[RequestOutcome]]]:
    """The outcomes of each round of A and of B; after Ctrl-C those of the rounds that both completed.

    Raises: LoadFailed.
    """
    done: tuple[list[list[RequestOutcome]], list[list[RequestOutcome]]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            plan = dataclasses.replace(plans[side], seed=plans[side].seed + number)
            outcomes, interrupted = measure(Workload(plan), f"{'AB'[side]}, round {number + 1} of {rounds}")
            if interrupted:
                whole = min(map(len, done))
                return done[0][:whole], done[1][:whole]
            done[side].append(outcomes)
    return done


def _comparison(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Raises: ConfigError."""
    from kvrelay.load.compare import compare

    method, rows = compare(a, b)
    sides = {name: {key: side[key] for key in ("config", "samples")} for name, side in (("a", a), ("b", b))}
    told = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows]
    return {"kind": "comparison", "began": a["began"], "method": method, "rows": told, **sides}


def _say_left(duration_s: float, least: int, most: int) -> None:
    """Say how long a sweep takes, on standard error."""
    rates, minutes = (
        f"{low:g}" if low == high else f"{low:g} to {high:g}"
        for low, high in ((least, most), (round(least * duration_s / 60, 1), round(most * duration_s / 60, 1)))
    )
    more = f"{rates} more rates of {duration_s:g} s: {minutes} min, and the time in which backlogs drain"
    print(f"kvrelay: {more}", file=sys.stderr, flush=True)


def _write_files(json_file: Path | None, html_file: Path | None, result: dict[str, Any]) -> None:
    """Raises: LoadFailed."""
    from kvrelay.load.report.page import render

    if json_file is not None:
        write(json_file, json.dumps(result, indent=1) + "\n")
    if html_file is not None:
        write(html_file, render(result))


def _finish(result: dict[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    """Write the files and print the tables. Raises: LoadFailed."""
    from kvrelay.admin.show import console
    from kvrelay.load import show

    try:
        _write_files(json_file, html_file, result)
    finally:  # print even if a file failed: a run may have taken hours
        shown = {"run": show.run, "sweep": show.sweep, "comparison": show.comparison}[result["kind"]]
        console().print(shown(result))

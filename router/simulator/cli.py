"""`kvrelay simulate`. Imports the simulator only when it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.base.errors import ConfigError
from common.config.cli import check_writable, run_checked
from common.config.service_configs import RouterConfig

if TYPE_CHECKING:
    from router.simulator.hardware import Hardware
    from router.simulator.run import Simulation, SimulationOutcome
    from router.simulator.traces import TraceLine

_HELP = """Simulate a cluster: the router's real index and policies, with nodes in virtual time.

Prints the prefix hit rate, latencies, goodput and imbalance of each policy. Requests come from a trace in Mooncake's
format or are synthetic: conversations that share system prompts. Node costs are formulas that you can fit to your own.

[bold]Examples:[/bold] kvrelay simulate --trace trace.jsonl --prefill 4 --decode 4 --policy kv_aware,round_robin

  kvrelay simulate --requests 100000 --rate 200 --prefill 100 --decode 100 --plot run.png

  kvrelay simulate --planner --mix-period 7200 --requests 90000 --rate 12 --slo-tpot 0.03

  kvrelay simulate --trace trace.jsonl --goodput 0.9 --hardware prefill_token_s=80e-6,link_bytes_s=3e9
"""

_LEAST, _MAX_NODES, _MAX_BLOCK_TOKENS = 1e-6, 100_000, 2**20
"""Limits of options, so that virtual times stay finite and a run begins in time."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


Trace = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        help="Trace in Mooncake's format (JSON lines) or Azure's (CSV); without one, requests are synthetic. Given twice, with "
        "--rate and --mix-period: two traces whose shares turn.",
    ),
]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Number of requests; a trace with fewer is overlaid with itself.")
]
SecondRate = Annotated[
    float | None, typer.Option(help="With two traces: requests per second of the second; default: --rate.")
]
BlockTokens = Annotated[int, typer.Option(min=1, max=_MAX_BLOCK_TOKENS, help="Tokens per block, as in the trace.")]
Admit = Annotated[
    bool,
    typer.Option(
        help="Reject requests (429) as the router does, with the objectives as its --slo-ttft and --slo-tpot."
    ),
]
MaxWaiting = Annotated[int, typer.Option(min=1, help="With --admission: the router's option of this name.")]
MaxQueueWait = Annotated[float, typer.Option(min=0, help="With --admission: the router's option of this name.")]
Goodput = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Find the highest rate at which this share of requests meets both objectives."),
]
Costs = Annotated[str, typer.Option(metavar="NAME=VALUE,...", help="Node costs, see router/simulator/hardware.py.")]
Planner = Annotated[
    bool,
    typer.Option(
        "--planner",
        help="Compare the planner of routers with one that knows the next ten minutes, and with fixed splits of as many nodes.",
    ),
]
NodeStart = Annotated[
    float, typer.Option("--node-start", min=0, help="With --planner: seconds until a new node takes requests.")
]
MixPeriod = Annotated[
    float | None,
    typer.Option(
        help="Synthetic requests whose mix turns with this period in seconds, from long prompts with short answers to the "
        "opposite and back; or the period of two traces, from 80:20 to 20:80 and back."
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this JSON file; - for standard output.")
]
Plot = Annotated[Path | None, typer.Option(help="Write a plot to this .png, .svg or .pdf file; needs matplotlib.")]


@app.command("simulate", help=_HELP)
def simulate_command(
    trace: Trace = None,
    requests: Requests = None,
    rate_scale: Annotated[float, typer.Option(help="Factor on the trace's request rate.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Requests per second, synthetic ones or of two traces.")] = 4.0,
    second_rate: SecondRate = None,
    prefill: Annotated[int, typer.Option(min=0, max=_MAX_NODES, help="Number of prefill nodes.")] = 4,
    decode: Annotated[int, typer.Option(min=1, max=_MAX_NODES, help="Number of decode nodes.")] = 4,
    policy: Annotated[str, typer.Option(help="Policy, or several to compare, separated by commas.")] = "kv_aware",
    cache_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each prefill node.")] = 5000,
    decode_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of each decode node.")] = 5000,
    block_tokens: BlockTokens = 512,
    index_delay: Annotated[float, typer.Option(min=0, help="Seconds until a new block is in the index.")] = 0.1,
    local_prefill_tokens: Annotated[int | None, typer.Option(min=0, help="The router's option of this name.")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Objective: maximum seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective: maximum seconds per further token.")] = 0.1,
    admission: Admit = False,
    max_waiting: MaxWaiting = RouterConfig.max_waiting,
    max_queue_wait_s: MaxQueueWait = RouterConfig.max_queue_wait_s,
    goodput: Goodput = None,
    hardware: Costs = "",
    planner: Planner = False,
    node_start_s: NodeStart = 60.0,
    mix_period: MixPeriod = None,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal runs.")] = 0,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    def run() -> None:
        from router.requests.admission import Objectives
        from router.simulator.hardware import Shape
        from router.simulator.run import Simulation
        from router.simulator.simulated_router import Admission

        _check_positive(rate_scale=rate_scale, rate=rate, slo_ttft=slo_ttft, slo_tpot=slo_tpot)
        _check_output(json_file, goodput, plot)
        costs, (first, second) = _hardware(hardware), _traces(trace or [], block_tokens, mix_period, second_rate)
        if planner and (goodput is not None or plot is not None or "," in policy or prefill < 1):
            raise ConfigError("--planner takes one policy, one prefill node at least, and neither --goodput nor --plot")
        base = Simulation(
            shape=Shape(prefill, decode, cache_blocks, decode_blocks, block_tokens, index_delay, hardware=costs),
            trace=first,
            second=second,
            requests=requests,
            rate_scale=rate_scale,
            rate=rate,
            second_rate=second_rate,
            seed=seed,
            local_prefill_tokens=local_prefill_tokens,
            slo_ttft_s=slo_ttft,
            slo_tpot_s=slo_tpot,
            mix_period_s=mix_period,
            admission=Admission(max_waiting, max_queue_wait_s, Objectives(slo_ttft, slo_tpot)) if admission else None,
        )
        if planner:
            _compare_shapes(dataclasses.replace(base, policy=policy), node_start_s, json_file)
            return
        _show([dataclasses.replace(base, policy=name.strip()) for name in policy.split(",")], goodput, json_file, plot)

    run_checked(run)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not _LEAST <= value <= 1 / _LEAST:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be above 0, from {_LEAST:g} to {1 / _LEAST:g}, not {value:g}"
            )


def _traces(
    paths: Sequence[Path], block_tokens: int, mix_period: float | None, second_rate: float | None
) -> tuple[Sequence[TraceLine] | None, Sequence[TraceLine] | None]:
    """Read the first and the second trace, if there are any. Raises: ConfigError, also for options that do not fit them."""
    from router.simulator.traces import read_trace

    _check_mix(mix_period, len(paths))
    if second_rate is not None:
        _check_positive(second_rate=second_rate)
        if len(paths) < 2:
            raise ConfigError("--second-rate is for two traces: give --trace twice, or remove it")
    lines = [read_trace(path, block_tokens) for path in paths]
    return (lines[0] if lines else None), (lines[1] if len(lines) > 1 else None)


def _check_mix(mix_period: float | None, traces: int) -> None:
    if traces > 2 or (traces == 2) != (mix_period is not None and traces > 0):
        raise ConfigError(
            "--mix-period is for synthetic requests or for two traces: give --trace twice, or remove one of them"
        )
    if mix_period is not None:
        _check_positive(mix_period=mix_period)


def _check_output(json_file: Path | None, goodput: float | None, plot: Path | None) -> None:
    if json_file is not None and json_file != Path("-"):
        check_writable(json_file)
    if goodput is not None and plot is not None:
        raise ConfigError("--goodput finds one rate, which cannot be plotted: remove --plot")


def _hardware(text: str) -> Hardware:
    """Parse NAME=VALUE,... Raises: ConfigError for an unknown name."""
    from router.simulator.hardware import Hardware

    defaults = {field.name: field.default for field in dataclasses.fields(Hardware)}
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ConfigError(f"--hardware has no cost {name!r}, only {', '.join(defaults)}")
        try:
            given[name] = type(defaults[name])(float(value))
        except (ValueError, OverflowError):
            raise ConfigError(f"--hardware {name} must be a number, not {value!r}") from None
    return Hardware(**given)


def _show(simulations: list[Simulation], goodput: float | None, json_file: Path | None, plot_file: Path | None) -> None:
    from rich.console import Console

    from common.base.progress import LiveProgress
    from router.simulator.run import highest_rate, simulate
    from router.simulator.table import table

    console = Console(stderr=json_file == Path("-"))
    figures: list[dict[str, Any]] = []
    outcomes: list[SimulationOutcome] = []
    for simulation in simulations:
        console.print(f"[dim]simulating {simulation.policy}[/dim]", highlight=False)
        if goodput is None:
            with LiveProgress(simulation.policy, total=simulation.num_requests) as progress:
                outcomes.append(simulate(simulation, progress.advance))
            figures.append(outcomes[-1].figures)
            continue
        with LiveProgress(f"{simulation.policy}, requests of all rates") as progress:
            found = highest_rate(simulation, goodput, progress.advance)
        if found is None:
            raise ConfigError(f"{simulation.policy}: no rate keeps {goodput:.0%} of the requests inside the objectives")
        figures.append(found[1])
    console.print(table(figures))
    _write(figures, json_file)
    if plot_file is not None and outcomes:
        from router.simulator.plot import plot

        plot(outcomes, plot_file)


def _compare_shapes(simulation: Simulation, start_s: float, json_file: Path | None) -> None:
    from rich.console import Console

    from router.simulator.planned import compare_shapes
    from router.simulator.table import table_of_shapes

    console = Console(stderr=json_file == Path("-"))
    console.print("[dim]simulating the planner, foresight and fixed splits[/dim]", highlight=False)
    compared = compare_shapes(simulation, start_s)
    figures = [*compared.fixed, compared.hindsight, compared.planned, compared.foresight]
    console.print(table_of_shapes(figures))
    for at_s, decision in compared.changes:
        console.print(f"{at_s:,.0f} s: {decision.why}", highlight=False)
    _write(figures, json_file)


def _write(figures: list[dict[str, Any]], json_file: Path | None) -> None:
    if json_file == Path("-"):
        print(json.dumps(figures))
    elif json_file is not None:
        try:
            json_file.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {json_file}: {error.strerror}") from None

"""`kvrelay simulate`. Imports the simulator itself only when it runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.base.errors import ConfigError
from common.cli import check_writable, run_checked

if TYPE_CHECKING:
    from router.simulator.hardware import Hardware
    from router.simulator.run import Outcome, Simulation

_HELP = """Simulate a cluster: the router's own index and policies, nodes in virtual time.

Prints the prefix hit rate, latencies, goodput and imbalance of each policy. Requests come from a trace in Mooncake's
format, or are made up: conversations that share system prompts. The nodes' costs are formulas; fit them to yours.

[bold]Examples:[/bold] kvrelay simulate --trace trace.jsonl --prefill 4 --decode 4 --policy kv_aware,round_robin

  kvrelay simulate --requests 100000 --rate 200 --prefill 100 --decode 100 --plot run.png

  kvrelay simulate --trace trace.jsonl --goodput 0.9 --hardware prefill_token_s=80e-6,link_bytes_s=3e9
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command("simulate", help=_HELP)
def simulate_command(
    trace: Annotated[Path | None, typer.Option(help="JSON lines in Mooncake's format; none: synthetic.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; more than a trace has: it is overlaid.")
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="Times the trace's rate.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Synthetic requests per second.")] = 4.0,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill nodes.")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 4,
    policy: Annotated[str, typer.Option(help="One policy, or several to compare, with commas.")] = "kv_aware",
    cache_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of a prefill node.")] = 5000,
    decode_blocks: Annotated[int, typer.Option(min=1, help="KV blocks of a decode node.")] = 5000,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block, as the trace has it.")] = 512,
    index_delay: Annotated[float, typer.Option(min=0, help="Seconds until the index knows of a block.")] = 0.1,
    local_prefill_tokens: Annotated[
        int | None, typer.Option(min=0, help="As the router's option of this name.")
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="Objective: seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective: seconds per further token.")] = 0.1,
    admission: Annotated[
        bool, typer.Option(help="Answer 429 as the router does, with the objectives as its --slo-ttft and --slo-tpot.")
    ] = False,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="With --admission, as the router's option of this name.")
    ] = 256,
    max_queue_wait_s: Annotated[float, typer.Option(min=0, help="The same.")] = 60.0,
    goodput: Annotated[float | None, typer.Option(help="Find the highest rate with this share inside both.")] = None,
    hardware: Annotated[
        str, typer.Option(metavar="NAME=VALUE,...", help="Costs, see router/simulator/hardware.py.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Equal seeds, equal runs.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there; - for the screen.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw into this .png, .svg or .pdf; needs matplotlib.")] = None,
) -> None:
    def run() -> None:
        from router.requests.admission import Objectives
        from router.simulator.cluster import Shape
        from router.simulator.run import Simulation
        from router.simulator.simulated_router import Admission
        from router.simulator.workload import read_trace

        for name, value in (("rate-scale", rate_scale), ("rate", rate), ("slo-ttft", slo_ttft), ("slo-tpot", slo_tpot)):
            if not value > 0:
                raise ConfigError(f"--{name} must be above 0, not {value:g}")
        if json_file is not None and json_file != Path("-"):
            check_writable(json_file)
        if goodput is not None and plot is not None:
            raise ConfigError("--goodput looks for one rate: there is nothing to --plot")
        shape = Shape(
            prefill=prefill,
            decode=decode,
            cache_blocks=cache_blocks,
            decode_blocks=decode_blocks,
            block_tokens=block_tokens,
            index_delay_s=index_delay,
            hardware=_hardware(hardware),
        )
        base = Simulation(
            shape=shape,
            trace=None if trace is None else read_trace(trace, block_tokens),
            requests=requests,
            rate_scale=rate_scale,
            rate=rate,
            seed=seed,
            local_prefill_tokens=local_prefill_tokens,
            slo_ttft_s=slo_ttft,
            slo_tpot_s=slo_tpot,
            admission=Admission(max_waiting, max_queue_wait_s, Objectives(slo_ttft, slo_tpot)) if admission else None,
        )
        _show([dataclasses.replace(base, policy=name.strip()) for name in policy.split(",")], goodput, json_file, plot)

    run_checked(run)


def _hardware(text: str) -> Hardware:
    """From NAME=VALUE,... Raises: ConfigError for a name that there is not."""
    from router.simulator.hardware import Hardware

    defaults = {field.name: field.default for field in dataclasses.fields(Hardware)}
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ConfigError(f"--hardware knows no {name!r}; there are {', '.join(defaults)}")
        try:
            given[name] = type(defaults[name])(float(value))
        except (ValueError, OverflowError):
            raise ConfigError(f"--hardware {name} must be a number, not {value!r}") from None
    return Hardware(**given)


def _show(simulations: list[Simulation], goodput: float | None, json_file: Path | None, plot_file: Path | None) -> None:
    from rich.console import Console

    from router.simulator.run import highest_rate, simulate
    from router.simulator.table import table

    console = Console(stderr=json_file == Path("-"))
    figures: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    for simulation in simulations:
        console.print(f"[dim]simulating {simulation.policy}[/dim]", highlight=False)
        if goodput is None:
            outcomes.append(simulate(simulation))
            figures.append(outcomes[-1].figures)
            continue
        found = highest_rate(simulation, goodput)
        if found is None:
            raise ConfigError(f"{simulation.policy}: no rate keeps {goodput:.0%} of the requests inside the objectives")
        figures.append(found[1])
    console.print(table(figures))
    if json_file == Path("-"):
        print(json.dumps(figures))
    elif json_file is not None:
        try:
            json_file.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {json_file}: {error.strerror}") from None
    if plot_file is not None and outcomes:
        from router.simulator.plot import plot

        plot(outcomes, plot_file)

"""`scripts/check-load`: does `kvrelay load` report what aiperf and guidellm report of the same server?

The server is a router on stub nodes with fixed times. The programs take turns, each with an environment of its own; the
medians of the rounds are compared. Writes the table of docs/load.md; exit code 1 if a figure differs by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench.peers.environments import Environment, reason_in  # noqa: E402
from support.steady_node import SteadyNode  # noqa: E402
from support.stub_node import make_model_folder, running_stack  # noqa: E402

from common.config.service_configs import RouterConfig  # noqa: E402

_DOCS, _BEGIN, _END = _ROOT / "docs" / "load.md", "<!-- check-load: begin -->", "<!-- check-load: end -->"
_PROGRAM_S = 300.0
_MAX_DIFFERENCE = 0.05
_STALLED_S, _TRIES = 0.1, 6
"""A server that stood still for so long did not have its fixed times: that run is repeated, so often at most."""
_STREAMS, _REQUESTS, _WARM_UP, _PROMPT, _OUTPUT = 4, 80, 4, 64, 32

Figures = dict[str, float]
"""By name: requests and tokens per second, mean latencies in milliseconds."""

FIGURES = ("requests/s", "output tokens/s", "time to first token, ms", "between tokens, ms", "whole request, ms")


@dataclass(frozen=True)
class Program:
    """A load generator: its command for a server, and how its results are read."""

    name: str
    package: str
    """From PyPI; empty: this project."""
    command: Callable[[str, str, Path, Path], Sequence[str]]
    """(program's folder, URL, model folder, folder of results) -> command."""
    read: Callable[[Path], Figures]


def _kvrelay(_: str, url: str, model: Path, out: Path) -> list[str]:
    shape = ["--chat", "--prefix-tokens", "0", "--suffix-tokens", str(_PROMPT // 2), "--output-tokens", str(_OUTPUT)]
    pace = ["--concurrency", str(_STREAMS), "--requests", str(_REQUESTS), "--warmup", str(_WARM_UP)]
    command = [sys.executable, "-m", "kvrelay", "load", "run", "--url", url, "--json", str(out / "run.json")]
    return [*command, *shape, *pace]


def _read_kvrelay(out: Path) -> Figures:
    summary = json.loads((out / "run.json").read_text("utf-8"))["summary"]
    times = [1000 * summary[key]["mean"] for key in ("ttft_s", "tpot_s", "e2e_s")]
    return dict(zip(FIGURES, [summary["requests_per_s"], summary["output_tokens_per_s"], *times], strict=True))


def _aiperf(folder: str, url: str, model: Path, out: Path) -> list[str]:
    lengths = ("--synthetic-input-tokens-mean", str(_PROMPT), "--synthetic-input-tokens-stddev", "0")
    lengths += (
        "--output-tokens-mean",
        str(_OUTPUT),
        "--output-tokens-stddev",
        "0",
        "--extra-inputs",
        "ignore_eos:true",
    )
    pace = ("--concurrency", str(_STREAMS), "--request-count", str(_REQUESTS), "--warmup-request-count", str(_WARM_UP))
    command = (f"{folder}/bin/aiperf", "profile", "--model", model.name, "--url", url, "--endpoint-type", "chat")
    return [
        *command,
        "--streaming",
        "--tokenizer",
        str(model),
        "--ui",
        "simple",
        "--artifact-dir",
        str(out),
        *lengths,
        *pace,
    ]


def _read_aiperf(out: Path) -> Figures:
    path = min(out.rglob("profile_export_aiperf.json"), key=lambda found: len(found.parts))  # a phase may have one too
    found: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    keys = ("request_throughput", "output_token_throughput", "time_to_first_token", "inter_token_latency")
    return dict(zip(FIGURES, [found[key]["avg"] for key in (*keys, "request_latency")], strict=True))


def _guidellm(folder: str, url: str, model: Path, out: Path) -> list[str]:
    return [
        *(f"{folder}/bin/guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={model.name}"),
        *("--profile", f"kind=concurrent,streams={_STREAMS}", "--constraint", f"kind=max_requests,count={_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={_PROMPT},output_tokens={_OUTPUT}"),
        *("--output", f"kind=json,path={out / 'guidellm.json'}"),
    ]


def _read_guidellm(out: Path) -> Figures:
    found = json.loads((out / "guidellm.json").read_text("utf-8"))["benchmarks"][0]["metrics"]
    keys = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
    values = [found[key]["successful"]["mean"] for key in keys]
    return dict(zip(FIGURES, [*values, 1000 * found["request_latency"]["successful"]["mean"]], strict=True))


PROGRAMS = (
    Program("kvrelay load", "", _kvrelay, _read_kvrelay),
    Program("aiperf", "aiperf", _aiperf, _read_aiperf),
    Program("guidellm", "guidellm", _guidellm, _read_guidellm),
)


class _StallWatch:
    """The longest time for which this process, which is also the server, stood still."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> float:
        self._task.cancel()
        return self.longest_s

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await asyncio.sleep(0.01)
            self.longest_s = max(self.longest_s, loop.time() - began_s)


async def _measure(program: Program, cache: Path, url: str, model: Path) -> Figures:
    """Run the program while the server does not stall. Raises: RuntimeError if it fails, or the server always stalls."""
    for _ in range(_TRIES):
        figures, stalled_s = await _measure_once(program, cache, url, model)
        if stalled_s < _STALLED_S:
            return figures
        print(f"{program.name}: the server stood still for {stalled_s:.1f} s; once more", flush=True)
    raise RuntimeError(
        f"the server stood still for {_STALLED_S:g} s or more in each of {_TRIES} runs: this machine is too busy"
    )


async def _measure_once(program: Program, cache: Path, url: str, model: Path) -> tuple[Figures, float]:
    """The figures, and the server's longest stall in seconds. Raises: RuntimeError if the program fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = program.command(str(cache / program.package), url, model, out)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        watch = _StallWatch()
        try:
            said, _ = await asyncio.wait_for(process.communicate(), _PROGRAM_S)
        finally:
            stalled_s = watch.stop()
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return program.read(out), stalled_s
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{program.name}: {error!r}: {reason_in(said.decode(errors='replace'))}") from error


async def _rounds(cache: Path, rounds: int) -> dict[str, list[Figures]]:
    """The figures of each program, in turns."""
    found: dict[str, list[Figures]] = {program.name: [] for program in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model_folder(Path(folder) / "stub-model")
        nodes = [SteadyNode(role, f"{role}-0", str(model), remembers=False) for role in ("prefill", "decode")]
        # Every prompt is relayed: a decode node that is asked directly is as fast, but the way is another one.
        async with running_stack(RouterConfig(policy="least_load", local_prefill_tokens=0), *nodes) as stack:
            for _ in range(rounds):
                for program in PROGRAMS:
                    found[program.name].append(await _measure(program, cache, stack.url, model))
                    print(
                        program.name,
                        {name: round(value, 2) for name, value in found[program.name][-1].items()},
                        flush=True,
                    )
    return found


def table(found: Mapping[str, Sequence[Figures]]) -> tuple[str, float]:
    """The medians as a table, and the largest difference of ours from another's."""
    ours, *others = (program.name for program in PROGRAMS)
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in FIGURES} for name, runs in found.items()
    }
    lines = [
        f"| mean | {ours} | {' | '.join(f'{name} | differs' for name in others)} |",
        "|---|---|" + "---|---|" * len(others),
    ]
    worst = 0.0
    for key in FIGURES:
        cells = [f"{median[ours][key]:.2f}"]
        for name in others:
            difference = median[ours][key] / median[name][key] - 1
            worst = max(worst, abs(difference))
            cells += [f"{median[name][key]:.2f}", f"{100 * difference:+.1f} %"]
        lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines), worst


def main() -> int:
    """Install, measure, write the table."""
    parser = argparse.ArgumentParser("check-load", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache", type=Path, default=_ROOT / ".check-clients", help="environments, as of check-clients"
    )
    args = parser.parse_args()
    cache: Path = args.cache.resolve()
    for program in PROGRAMS:
        if program.package:
            Environment(cache / program.package).prepare([program.package])
    made, worst = table(asyncio.run(_rounds(cache, args.rounds)))
    head, _, rest = _DOCS.read_text("utf-8").partition(_BEGIN)
    _DOCS.write_text(f"{head}{_BEGIN}\n\n{made}\n\n{_END}{rest.partition(_END)[2]}", "utf-8")
    print(made)
    print(f"the largest difference is {100 * worst:.1f} %, at most {100 * _MAX_DIFFERENCE:g} % is allowed")
    return int(worst > _MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())

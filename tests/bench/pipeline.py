"""The share of time in which pipeline stages compute, and whether splitting a model makes it slower."""

from __future__ import annotations

import os
from typing import Any

from bench.pipeline_split import balanced_layers
from bench.results import Result, Target, median
from bench.session import Session
from bench.worker import PASSIVE, Worker

_STAGES = 2
_REQUESTS, _PROMPT = 64, 4
_NEW_TOKENS = 40
_KEPT = 40
Run = dict[str, Any]


def run(session: Session) -> Result:
    """A decode node of two stages under load; in turn with it, some of its steps in one process with as many threads
    as a stage has, alone and while a second such process keeps the other core and the memory as busy. Processor time
    beside busy time: it says the same on a machine that does other work, too."""
    result = Result("pipeline")
    session.stop_system()
    session.stop_plain()
    layers = balanced_layers(session.shape, _STAGES)
    runs = _measure(session, ",".join(str(count) for count in layers))
    _bubble(result, runs, layers)
    _arithmetic(result, runs)
    result.details |= {"split": layers, "runs": runs}
    return result


def _measure(session: Session, split: str) -> list[Run]:
    folder = str(session.folder)
    record = session.folder.parent / "pipeline-steps.pickle"
    single = {"folder": folder, "threads": max(1, (os.cpu_count() or 1) // _STAGES)}
    workers: list[Worker] = []
    runs: list[Run] = []
    try:
        workers.append(
            node := Worker("bench.pipeline_node:PipelineNode", environ=PASSIVE, folder=folder, pp_layers=split)
        )
        for _ in range(2):
            workers.append(Worker("bench.pipeline_node:SingleProcess", environ=PASSIVE, **single))
        one, twin = workers[1:]
        sizes = {"requests": _REQUESTS, "prompt": _PROMPT, "keep": _KEPT, "record": str(record)}
        node.call("measure", new_tokens=4, **sizes)
        for _ in range(session.repeats(3)):
            run = node.call("measure", new_tokens=_NEW_TOKENS, **sizes)
            run["alone_s"], run["alone_cpu_s"] = one.call("replay", record=str(record))
            for worker in (one, twin):
                worker.start("replay", record=str(record))
            beside = [worker.result() for worker in (one, twin)]
            run["beside_s"], run["beside_cpu_s"] = (sum(values) / 2 for values in zip(*beside, strict=True))
            runs.append(run)
    finally:
        for worker in workers:
            worker.close()
        record.unlink(missing_ok=True)
    return runs


def _bubble(result: Result, runs: list[Run], layers: list[int]) -> None:
    for stage in range(_STAGES):
        shares = [run["steady"][stage]["busy_s"] / run["steady"][stage]["up_s"] for run in runs]
        seconds = median([run["steady"][stage]["up_s"] for run in runs])
        result.add(
            f"stage {stage} computes",
            100 * median(shares),
            "% of the time",
            target=Target(90),
            note=f"{layers[stage]} layers, {_REQUESTS} requests, {seconds:.0f} s in which all of them generate",
        )
    whole = [min(stage["busy_s"] / stage["up_s"] for stage in run["whole"]) for run in runs]
    result.add("the idler stage, prompts and the end included", 100 * median(whole), "% of the time")
    result.add("tokens, whole run", median([run["tokens"] / run["wall_s"] for run in runs]), "tokens/s")


def _arithmetic(result: Result, runs: list[Run]) -> None:
    got = median([run["kept_cpu_s"] / sum(run["kept_s"]) for run in runs])
    result.add("processor time per busy second of a stage", got, "x", note="below 0.95 other work was on the cores")
    for kind, both, single in (
        ("both stages' busy time", lambda run: sum(run["kept_s"]), ""),
        ("both ranks' processor time", lambda run: run["kept_cpu_s"], "_cpu"),
    ):
        for where, key in (("alone on the machine", "alone"), ("beside a second such process", "beside")):
            ratios = [both(run) / run[f"{key}{single}_s"] for run in runs]
            seconds = median([run[f"{key}{single}_s"] for run in runs])
            result.add(
                f"{kind} / one process's, {where}",
                median(ratios),
                "x",
                target=Target(1.1, at_most=True),
                note=f"the same {runs[-1]['kept']} steps, {seconds:.1f} s; {min(ratios):.2f} to {max(ratios):.2f}",
            )

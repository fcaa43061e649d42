"""How much of the time the stages of a pipeline compute, and whether splitting a model costs arithmetic."""

from __future__ import annotations

import os
from typing import Any

from load.pipeline_split import balanced_layers
from load.results import Result, Target, median
from load.session import Session
from load.worker import PASSIVE, Worker

_STAGES = 2
_REQUESTS, _PROMPT = 64, 4
_NEW_TOKENS = 80
"""The scheduler lets requests in one by one, so that all run at once only after about as many steps."""
_KEPT = 40
Run = dict[str, Any]


def run(session: Session) -> Result:
    """A decode node of two stages under load; in turn with it, some of its steps in one process with as many threads
    as a stage has, alone and while a second such process keeps the other core and the memory as busy."""
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
    record = session.folder.parent / "pipeline-steps.jsonl"
    single = {"folder": folder, "threads": max(1, (os.cpu_count() or 1) // _STAGES)}
    workers: list[Worker] = []
    runs: list[Run] = []
    try:
        workers.append(
            node := Worker("load.pipeline_node:PipelineNode", environ=PASSIVE, folder=folder, pp_layers=split)
        )
        for _ in range(2):
            workers.append(Worker("load.pipeline_node:SingleProcess", environ=PASSIVE, **single))
        one, twin = workers[1:]
        sizes = {"requests": _REQUESTS, "prompt": _PROMPT, "keep": _KEPT, "record": str(record)}
        node.call("measure", new_tokens=4, **sizes)
        for _ in range(session.repeats(3)):
            runs.append(node.call("measure", new_tokens=_NEW_TOKENS, **sizes))
            runs[-1]["alone_s"] = one.call("replay", record=str(record))
            for worker in (one, twin):
                worker.start("replay", record=str(record))
            runs[-1]["beside_s"] = sum([worker.result() for worker in (one, twin)]) / 2
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
    for name, key in (("alone on the machine", "alone_s"), ("beside a second such process", "beside_s")):
        ratios = [sum(run["kept_s"]) / run[key] for run in runs]
        result.add(
            "both stages' busy time / one process's forwards",
            median(ratios),
            "x",
            target=Target(1.1, at_most=True),
            note=f"the same {runs[-1]['kept']} steps, {median([run[key] for run in runs]):.1f} s {name}; "
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )

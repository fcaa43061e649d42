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


def run(session: Session) -> Result:
    """A decode node of two stages under load; then the very same steps in one process with as many threads as a stage."""
    result = Result("pipeline")
    session.stop_system()
    session.stop_plain()
    layers = balanced_layers(session.shape, _STAGES)
    split = ",".join(str(count) for count in layers)
    record = session.folder.parent / "pipeline-steps.jsonl"
    runs = _pipelined(session, split, str(record))
    _bubble(result, runs, split)
    alone, beside = _single(session, str(record))
    record.unlink()
    _arithmetic(result, runs, alone, beside)
    result.details |= {"split": layers, "runs": runs, "alone_s": alone, "beside_s": beside}
    return result


def _pipelined(session: Session, split: str, record: str) -> list[dict[str, Any]]:
    node = Worker("load.pipeline_node:PipelineNode", environ=PASSIVE, folder=str(session.folder), pp_layers=split)
    try:
        sizes = {"prompt": _PROMPT, "record": record}
        node.call("measure", requests=_REQUESTS, new_tokens=4, **sizes)
        new_tokens = session.repeats(40, 16)
        return [
            node.call("measure", requests=_REQUESTS, new_tokens=new_tokens, **sizes) for _ in range(session.repeats(2))
        ]
    finally:
        node.close()


def _single(session: Session, record: str) -> tuple[list[float], list[float]]:
    """Forward seconds alone, and while a second such process keeps another core and the memory busy."""
    threads = max(1, (os.cpu_count() or 1) // _STAGES)
    sizes = {"folder": str(session.folder), "threads": threads}
    alone: list[float] = []
    beside: list[float] = []
    one = Worker("load.pipeline_node:SingleProcess", environ=PASSIVE, **sizes)
    try:
        twin = Worker("load.pipeline_node:SingleProcess", environ=PASSIVE, **sizes)
        try:
            for _ in range(session.repeats(2)):
                alone.append(one.call("replay", record=record))
                for worker in (one, twin):
                    worker.start("replay", record=record)
                beside += [worker.result() for worker in (one, twin)]
        finally:
            twin.close()
    finally:
        one.close()
    return alone, beside


def _bubble(result: Result, runs: list[dict[str, Any]], split: str) -> None:
    for stage in range(_STAGES):
        shares = [run["steady"][stage]["busy_s"] / run["steady"][stage]["up_s"] for run in runs]
        seconds = median([run["steady"][stage]["up_s"] for run in runs])
        result.add(
            f"stage {stage} computes",
            100 * median(shares),
            "% of the time",
            target=Target(90),
            note=f"layers {split}, {_REQUESTS} requests, {seconds:.0f} s in which all of them decode",
        )
    whole = [min(stage["busy_s"] / stage["up_s"] for stage in run["whole"]) for run in runs]
    result.add("the idler stage, prompts and the end included", 100 * median(whole), "% of the time")
    result.add("tokens, whole run", median([run["tokens"] / run["wall_s"] for run in runs]), "tokens/s")


def _arithmetic(result: Result, runs: list[dict[str, Any]], alone: list[float], beside: list[float]) -> None:
    busy_s = median([sum(stage["busy_s"] for stage in run["whole"]) for run in runs])
    for name, single in (("alone on the machine", alone), ("beside a second such process", beside)):
        result.add(
            "both stages' busy time / one process's forwards",
            busy_s / median(single),
            "x",
            target=Target(1.1, at_most=True),
            note=f"the same {runs[-1]['steps']} steps: {busy_s:.1f} s against {median(single):.1f} s {name}",
        )

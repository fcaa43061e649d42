"""The order of a comparison: turns, and systems that break."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bench.peers import comparison
from bench.peers.comparison import Comparison, Options
from bench.peers.environments import Unavailable
from rich.console import Console


class Machine:
    """Stands for the process that measures the limits."""

    def __init__(self, *_: object, **__: object) -> None:
        self.rate = 0.0

    def call(self, method: str, **_: object) -> Any:
        self.rate += 1
        return {"cpu": "any"} if method == "about" else {"kernel": self.rate}

    def close(self) -> None: ...


@dataclass
class Scripted:
    """A system whose turns are recorded."""

    name: str
    turns: list[str]
    rows: Sequence[str] | None = None
    title: str = "any"
    options: str = ""
    broken: set[str] = field(default_factory=set)

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        if "prepare" in self.broken:
            raise Unavailable("no wheel for this machine")

    @contextlib.contextmanager
    def served(self, checkpoint: Path, log: Path) -> Iterator[str]:
        self.turns.append(self.name)
        if "serve" in self.broken:
            raise Unavailable("it ended with code 1")
        yield f"http://{self.name}"


def compare(monkeypatch: pytest.MonkeyPatch, systems: list[Scripted], rounds: int = 3) -> Comparison:
    def row(probe: Any) -> dict[str, float]:
        if probe.url.endswith("breaks"):
            raise RuntimeError("the stream broke")
        return {"one_stream": 1.0}

    monkeypatch.setattr(comparison, "Worker", Machine)
    monkeypatch.setattr(comparison, "every_system", lambda cache: {system.name: system for system in systems})
    monkeypatch.setattr(comparison, "make_checkpoint", lambda shape, folder: folder)
    monkeypatch.setattr(comparison, "warm_up", lambda probe: None)
    monkeypatch.setattr(comparison, "ROWS", {"one_stream": row, "interference": row})
    options = Options(Path(), [s.name for s in systems], ["33m"], ["one_stream"], rounds)
    made = Comparison(options, Console(file=io.StringIO()))
    made.prepare()
    made.compare()
    return made


def test_every_other_round_runs_in_reversed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    compare(monkeypatch, [Scripted("kvrelay", turns), Scripted("vllm", turns)])
    assert turns == ["kvrelay", "vllm", "vllm", "kvrelay", "kvrelay", "vllm"]


def test_limits_are_measured_anew_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compare(monkeypatch, [Scripted("kvrelay", []), Scripted("vllm", [])])
    reads = [limits.read for limits in made.samples.limits["33m"]]
    assert len(reads) == 3
    assert reads == sorted(set(reads))


def test_a_peer_that_breaks_is_named_and_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    systems = [
        Scripted("kvrelay", turns),
        Scripted("absent", turns, broken={"prepare"}),
        Scripted("silent", turns, broken={"serve"}),
        Scripted("breaks", turns),
        Scripted("vllm", turns),
    ]
    made = compare(monkeypatch, systems, rounds=2)
    assert turns == ["kvrelay", "silent", "breaks", "vllm", "vllm", "breaks", "kvrelay"]
    assert made.samples.left_out == {
        "absent": "no wheel for this machine",
        "silent": "it ended with code 1",
        "breaks, 33m, one_stream": "RuntimeError: the stream broke",
    }
    figures = made.samples.figures["33m"]
    assert figures["kvrelay"] == figures["vllm"] == [{"one_stream": 1.0}] * 2
    assert figures["breaks"] == [{}, {}]


def test_a_system_without_a_chosen_row_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    made = compare(monkeypatch, [Scripted("kvrelay", turns), Scripted("vllm-256", turns, rows=("interference",))])
    assert set(turns) == {"kvrelay"}
    assert "vllm-256" not in made.samples.figures["33m"]

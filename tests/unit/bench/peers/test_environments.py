"""Installing peers: what failed is said in one line, and what was installed is not installed again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.peers.environments import Environment, Unavailable, reason_in, run_step


def test_the_reason_is_the_last_line_that_names_an_error() -> None:
    log = "collecting\nERROR: No matching distribution\nValueError: too little memory\n\nsee the manual\n"
    assert reason_in(log) == "ValueError: too little memory"
    assert reason_in("one\ntwo\n") == "two"
    assert reason_in("") == "it printed nothing"


def test_a_step_that_fails_says_why_and_keeps_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "step.log"
    with pytest.raises(Unavailable, match="no such wheel"):
        run_step([sys.executable, "-c", "raise SystemExit('ERROR: no such wheel')"], log)
    assert "no such wheel" in log.read_text("utf-8")
    with pytest.raises(Unavailable, match="absent-program"):
        run_step([str(tmp_path / "absent-program")], log)


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"more than 0\.01 s"):
        run_step([sys.executable, "-c", "import threading; threading.Event().wait()"], tmp_path / "log", 0.01)


def test_what_is_installed_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    monkeypatch.setattr("bench.peers.environments.run_step", lambda command, *_: commands.append(command[1]))
    monkeypatch.setattr(Environment, "_refuse_cuda", lambda self, arguments: None)
    environment = Environment(tmp_path / "peer")
    finished: list[int] = []

    def finish() -> None:
        environment.folder.mkdir(exist_ok=True)
        finished.append(1)

    for wanted in (["a==1"], ["a==1"], ["a==2"]):
        environment.prepare(wanted, finish)
    assert len(finished) == 2


@pytest.mark.parametrize(("name", "refused"), [("nvidia-cublas", True), ("nvidia-ml-py", False), ("numpy", False)])
def test_an_installation_that_would_bring_cuda_is_refused(
    name: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment(tmp_path)

    def pip(self: Environment, *arguments: str) -> None:
        assert "--dry-run" in arguments
        Path(arguments[-1]).write_text(f'{{"install": [{{"metadata": {{"name": "{name}"}}}}]}}', "utf-8")

    monkeypatch.setattr(Environment, "pip", pip)
    if refused:
        with pytest.raises(Unavailable, match="CUDA"):
            environment._refuse_cuda(["install", "peer"])
    else:
        environment._refuse_cuda(["install", "peer"])

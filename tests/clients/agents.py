"""Coding agents and the AI SDK, unchanged, against models whose chat templates differ in the roles that they take.

Two templates are those of a router on stub nodes, whose answers a script decides: the first calls the tool that was offered. The
third model is the real small one. An agent must end well, and the router may not have refused any of its requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from clients.scripted import MODEL, scripted_router
from support.system import running_system

from scripts.small_model import NAME, small_model

_TEMPLATES = Path(__file__).parent / "templates"
_AGENT_S = 300.0
_TASK = "Write the word kvrelay into the file proof.txt."
_COMMAND = "echo kvrelay > proof.txt && echo written"
_CALLS = {
    "Bash": {"command": _COMMAND, "description": "Write the file"},
    "exec_command": {"cmd": _COMMAND},
    "get_weather": {"city": "Paris"},
}
"""By the names of the tools that agents offer: the arguments with which they are called."""
_SHORT_PROMPT = "You are a helpful assistant."
REAL = "real small model"


@dataclass(frozen=True)
class Run:
    """A model that agents are run against."""

    name: str
    served: Callable[[Path], contextlib.AbstractContextManager[str]]
    """(a folder) -> the router's URL."""
    model: str = MODEL

    @property
    def is_real(self) -> bool:
        """Whether a model answers, which may not do what it is told, and has no room for long prompts."""
        return self.name == REAL


@dataclass(frozen=True)
class Agent:
    """A command-line agent of npm: how it is told its task, and how the conversation goes on."""

    name: str
    packages: Sequence[str]
    program: str
    task: Sequence[str]
    again: Sequence[str]
    short: Sequence[str]
    """Options for a model with a short context."""
    configure: Callable[[Path, str, str], dict[str, str]]
    """(its home folder, URL, model) -> environment variables."""


def _claude(home: Path, url: str, model: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }


def _codex(home: Path, url: str, model: str) -> dict[str, str]:
    provider = f'[model_providers.kvrelay]\nname = "kvrelay"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / "config.toml").write_text(f'model = "{model}"\nmodel_provider = "kvrelay"\n{provider}')
    (home / "short.md").write_text(_SHORT_PROMPT)
    return {"CODEX_HOME": str(home)}


_CODEX_OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
AGENTS = (
    Agent(
        "Claude Code",
        ["@anthropic-ai/claude-code"],
        "claude",
        ("-p", "--dangerously-skip-permissions"),
        ("-p", "--continue", "--dangerously-skip-permissions"),
        ("--bare", "--tools", "Bash", "--system-prompt", _SHORT_PROMPT),
        _claude,
    ),
    Agent(
        "Codex",
        ["@openai/codex"],
        "codex",
        ("exec", *_CODEX_OPTIONS),
        ("exec", "resume", "--last", *_CODEX_OPTIONS),
        ("-c", "model_instructions_file=short.md"),
        _codex,
    ),
)


def answer(prompt: str) -> str:
    """What the scripted model says: it calls the tool that was offered, once, and then it is done."""
    offered = [name for name in _CALLS if f'"name": "{name}"' in prompt]
    if not offered or "<tool_response>" in prompt or "[TOOL_RESULTS]" in prompt:
        return "All is done."
    call = {"name": offered[0], "arguments": _CALLS[offered[0]]}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@contextlib.contextmanager
def _small_model(folder: Path) -> Iterator[str]:
    with running_system(folder, "--model", str(small_model())) as system:
        system.wait_usable()
        yield system.url


def _scripted(template: str) -> Callable[[Path], contextlib.AbstractContextManager[str]]:
    return lambda folder: scripted_router(folder, _TEMPLATES / template, answer)


RUNS = (
    Run("system message first", _scripted("system_first.jinja")),
    Run("alternating roles", _scripted("alternating.jinja")),
    Run(REAL, _small_model, NAME),
)


def run_agent(agent: Agent, programs: Path, url: str, run: Run) -> dict[str, str]:
    """Give it a task, and go on with the conversation; by check, why it failed (empty: it passed)."""
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.configure(home, url, run.model)}
        options = [each.replace("short.md", str(home / "short.md")) for each in (agent.short if run.is_real else ())]
        program = str(programs / "node_modules" / ".bin" / agent.program)
        found: dict[str, str] = {}
        for check, words in (("a task", agent.task), ("the conversation goes on", agent.again)):
            refused = _refused(url)
            found[check] = _run([program, *words, *options, _TASK], work, environ)
            if not found[check] and _refused(url) > refused:
                found[check] = "the router refused a request"
        proof = work / "proof.txt"
        if not run.is_real and not found["a task"] and not (proof.is_file() and "kvrelay" in proof.read_text()):
            found["a task"] = "its tool was not called"
        return found


def _run(command: Sequence[str], work: Path, environ: dict[str, str]) -> str:
    """Why the agent failed; empty: it did not."""
    try:
        ended = subprocess.run(
            command,
            cwd=work,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_AGENT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {_AGENT_S:g} s"
    said = ended.stdout.strip()
    if ended.returncode:
        return f"exit code {ended.returncode}: {(said or ended.stderr.strip())[-300:]}"
    return "" if said else "it said nothing"


def _refused(url: str) -> float:
    """Responses with an error so far."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("kvrelay_http_errors_total{"))

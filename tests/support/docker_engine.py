"""A Docker engine for tests: whether one is available, the kvrelay image, and compose projects removed at the end.

The image is built as a user builds it, from a copy of the files that `.dockerignore` allows. If this machine's pip is
configured with find-links, PyTorch comes from there through compose/wheels: the project itself names no source.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.paths import ROOT
from support.system import wait_until

IMAGE = "kvrelay:under-test"
BASE_IMAGE = "python:3.11-slim-bookworm"
_CONTEXT = (
    *("pyproject.toml", "requirements.lock", "README.md", "LICENSE", "hatch_build.py", ".dockerignore", "compose"),
    *("scripts/cpu-torch", "scripts/gpu-requirements.txt"),
)
_PACKAGES = ("kvrelay", "common", "kvtransfer", "router", "prefill_node", "decode_node")
# Build on the host's network, for machines whose Docker network has no DNS.
_HOST_NETWORK = "services:\n  router: {build: {network: host}}\n"


def run(*command: str, env: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> str:
    """Run a command. Returns its standard output. Raises: AssertionError with all its output if it failed."""
    done = subprocess.run(
        command, env=dict(env) if env else None, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def why_not() -> str | None:
    """Why no container can run here; None if one can."""
    if shutil.which("docker") is None:
        return "no Docker"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no Docker engine answers"
    return None if compose_command() else "neither docker compose nor docker-compose"


@functools.cache
def compose_command() -> tuple[str, ...]:
    """The compose plugin, else the standalone program; empty if there is neither."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    return ()


def build_image(folder: Path) -> Path:
    """Build `IMAGE` from a copy of the sources in `folder`. Returns that folder's compose directory.

    The image stays in the engine, so that the next build finds its layers; the image that it replaces is removed.
    """
    for name in _CONTEXT + _PACKAGES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.whl", ".env"))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, folder / name)
    env = {**os.environ, "IMAGE": IMAGE, "BASE_IMAGE": BASE_IMAGE}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if "find-links" in run(*pip, "config", "list"):
        wanted = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "-c", str(ROOT / "requirements.lock")]
        run(*pip, "download", "-q", *wanted, "-d", str(folder / "compose/wheels"), "torch", timeout_s=600)
        env["PIP_EXTRA_INDEX_URL"] = ""
    (folder / "host-network.yaml").write_text(_HOST_NETWORK)
    files = ["-f", str(folder / "compose/compose.yaml"), "-f", str(folder / "host-network.yaml")]
    before = _image_ids()
    run(*compose_command(), *files, "build", "router", env=env, timeout_s=900)
    for replaced in before - _image_ids():
        subprocess.run(["docker", "rmi", replaced], capture_output=True, check=False)
    return folder / "compose"


def _image_ids() -> set[str]:
    """The id of the current `IMAGE`, or nothing."""
    return set(run("docker", "images", "-q", "--no-trunc", IMAGE).split())


@dataclass
class Project:
    """One compose project: all services of one host."""

    name: str
    files: tuple[Path, ...]
    settings: dict[str, str]
    _env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # Neither the tester's own settings nor an .env beside the file must have an effect.
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_HOST") if name in os.environ}
        env_file = self.files[0].parent / f"{self.name}.env"
        env_file.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()))
        self._env = inherited
        self._made_s = int(time.time())
        files = [word for file in self.files for word in ("-f", str(file))]
        self._command = [*compose_command(), "--env-file", str(env_file), "-p", self.name, *files]

    def compose(self, *args: str, timeout_s: float = 300.0) -> str:
        return run(*self._command, *args, env=self._env, timeout_s=timeout_s)

    def container(self, service: str) -> str:
        """The id of the one container of `service`."""
        [container] = self.containers(service)
        return container

    def containers(self, service: str) -> list[str]:
        """The ids of all containers of `service`."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, service: str, what: str) -> str:
        """A Go template applied to the output of `docker inspect`."""
        return run("docker", "inspect", "-f", what, self.container(service)).strip()

    def restarts(self, service: str) -> int:
        """How often the engine has restarted the service's container."""
        return int(self.inspect(service, "{{.RestartCount}}"))

    def history(self) -> list[str]:
        """Events so far, oldest first: `start SERVICE` and `health_status: healthy SERVICE`."""
        mine = f"label=com.docker.compose.project={self.name}"
        kinds = ("--filter", "event=start", "--filter", "event=health_status", "--filter", mine)
        line = '{{.Status}} {{index .Actor.Attributes "com.docker.compose.service"}}'
        span = ("--since", str(self._made_s), "--until", str(int(time.time()) + 1))
        return run("docker", "events", *span, *kinds, "--format", line).splitlines()

    def wait_healthy(self, *services: str, timeout_s: float = 90.0) -> None:
        def healthy() -> bool:
            containers = [container for service in services for container in self.containers(service)]
            status = run("docker", "inspect", "-f", "{{.State.Health.Status}}", *containers).split()
            return status == ["healthy"] * len(containers)

        try:
            wait_until(healthy, timeout_s, f"{', '.join(services)} healthy")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.compose('ps')}\n{self.compose('logs', '--tail=30')}") from error

    def crash(self, service: str) -> None:
        """SIGKILL the service's process from inside: the engine takes that for a crash, not for an operator's stop."""
        code = "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)"
        command = ["docker", "exec", self.container(service), "python", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        # The container's end may come before that of the command, and ends it.
        assert done.returncode in (0, 128 + signal.SIGKILL), done.stdout + done.stderr

    def left(self) -> str:
        """Containers, networks and volumes of this project that exist."""
        mine = ("--filter", f"label=com.docker.compose.project={self.name}", "-q")
        kinds = (("ps", "-a"), ("network", "ls"), ("volume", "ls"))
        return "".join(run("docker", *kind, *mine) for kind in kinds)


@contextlib.contextmanager
def project(name: str, files: tuple[Path, ...], settings: dict[str, str], *up: str) -> Iterator[Project]:
    """`up -d UP...` of `files`, each adding to those before it, until the block ends, then `down`; nothing must be left."""
    running = Project(name, files, settings)
    try:
        running.compose("up", "-d", "--no-build", *up)
        yield running
    except BaseException:
        with contextlib.suppress(AssertionError):
            print(running.compose("logs", "--tail=40"))
        raise
    finally:
        running.compose("down", "-v", "--remove-orphans")
    assert not running.left()

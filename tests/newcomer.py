"""`scripts/check-newcomer`: the README's way from a clone to Ctrl-C, with its own lines, in a clean clone and environment;
with `--container IMAGE` in a new container, which has nothing but Python, git and curl.

Only the standard library: it runs before anything is installed. Prints how long each step took; the first step that does not
do what the README says ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_URL = "http://127.0.0.1:8000"
_PROGRAMS = ("git", "curl", "procps")
"""What a slim image lacks of a newcomer's machine; no compiler."""
_KEPT = ("PATH", "HOME", "PYENV_ROOT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
"""Variables that a newcomer's shell has, too."""
_STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Print what is tried and how long it took."""
    began = time.monotonic()
    print(f"{what:48}", end="", flush=True)
    try:
        yield
    except BaseException:
        print(" failed")
        raise
    print(f" {time.monotonic() - began:6.1f} s")


def main() -> int:
    """Follow the README, here or in a container."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--container", metavar="IMAGE", help="in a new container of this image of Debian with Python")
    image = parser.parse_args().container
    return in_container(image) if image else follow()


def in_container(image: str) -> int:
    """Run this file in a container that has this repository and pip's settings, and is removed afterwards."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    pairs = [line.split("=", 1) for line in settings.stdout.splitlines()]
    values = {name.rsplit(".", 1)[-1]: value.strip("'\"") for name, value in pairs}
    words = [word for value in values.values() for word in value.split()]
    # The files of an index on this machine lie beside its pages.
    folders = {str(Path(word[7:]).parent) if word.startswith("file://") else word for word in [*words, str(_ROOT)]}
    mounts = [
        f"--volume={folder}:{folder}:ro" for folder in folders if folder.startswith("/") and Path(folder).exists()
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as config:
        config.write("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
        config.flush()
        follow_it = f"git config --global --add safe.directory '*' && python3 {Path(__file__).resolve()}"
        command = f"apt-get update -qq && apt-get install -y -qq {' '.join(_PROGRAMS)} >/dev/null 2>&1 && {follow_it}"
        mounts.append(f"--volume={config.name}:/etc/pip.conf:ro")
        options = ["--rm", "--init", "--network=host", "--shm-size=1g", *mounts]
        docker = ["docker", "run", *options, image, "sh", "-c", command]
        return subprocess.run(docker, check=False).returncode


def follow() -> int:
    """Follow the README. Raises: AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"XDG_RUNTIME_DIR": folder}
        with step("clone"):
            subprocess.run(["git", "clone", "-q", str(_ROOT), str(clone)], check=True)
        blocks = _blocks((clone / "README.md").read_text(encoding="utf-8"))
        log = Path(folder) / "run.log"
        with log.open("wb") as output:
            up = subprocess.Popen(["scripts/run"], cwd=clone, env=environ, stdout=output, stderr=output)
        try:
            with step("scripts/run, until it is ready"):
                _wait(lambda: "kvrelay is ready" in log.read_text(errors="replace"), up, 600)
            _use(clone, environ, blocks)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            up.send_signal(signal.SIGINT)
            code = up.wait(30)
        with step("Ctrl-C ends everything"):
            assert code in (0, 130), f"kvrelay up ended with exit code {code}"
            left = subprocess.run(["pgrep", "-f", str(clone)], capture_output=True, text=True, check=False).stdout
            assert not left, f"left behind: {left}"
    return 0


def _use(clone: Path, environ: dict[str, str], blocks: list[str]) -> None:
    kvrelay = str(clone / ".venv/bin/kvrelay")

    def run(*command: str, said: str = "") -> str:
        done = subprocess.run(
            command, cwd=clone, env=environ, capture_output=True, text=True, input=said, timeout=600, check=False
        )
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
        return done.stdout

    with step("the first request"):
        [curl] = [block for block in blocks if block.startswith("curl ")]
        assert "Paris" in run("sh", "-c", curl)
    with step("the official client"):
        run(sys.executable, "-m", "venv", "client")
        run("client/bin/pip", "install", "-q", "openai")
        [script] = [block for block in blocks if block.startswith("from openai")]
        assert "Ana" in run("client/bin/python", "-c", script)
    with step("the dashboard"):
        asked = urllib.request.Request(f"{_URL}/", headers={"accept": "text/html"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.url == f"{_URL}/ui/"
            assert b"<script" in answer.read()
    with step("a chat in the terminal"):
        assert "Paris" in run(kvrelay, "chat", said="What is the capital of France?\n")
    with step("kvrelay as the README writes it"):
        [use] = [block for block in blocks if block.startswith("export PATH=")]
        assert "decode-0" in run("sh", "-c", f"{use.splitlines()[0]}\nkvrelay admin nodes")
    with step("the admin commands"):
        assert "decode-0" in run(kvrelay, "admin", "nodes")
        run(kvrelay, "admin", "watch", "--count", "2")
        run(kvrelay, "admin", "check")
        kernels = json.loads(run(kvrelay, "admin", "node", "decode-0", "--json"))["node"]["kernels"]
        assert kernels.startswith("native"), kernels
        [newest, *_] = json.loads(run(kvrelay, "admin", "requests", "--json"))["requests"]
        assert "decision" in run(kvrelay, "admin", "request", newest["request_id"])
    with step("a load test"):
        assert "succeeded" in run(kvrelay, "load", "run", "--rate", "4", "--duration", "5")
    with step("kill -9 of the decode node in a stream"):
        with _stream() as pieces:
            undisturbed = "".join(pieces)
        with _stream() as pieces:
            text = "".join(next(pieces) for _ in range(5))
            os.kill(json.loads(run(kvrelay, "admin", "node", "decode-0", "--json"))["node"]["pid"], signal.SIGKILL)
            text += "".join(pieces)
        assert text == undisturbed, "the answer has changed"


@contextlib.contextmanager
def _stream() -> Iterator[Iterator[str]]:
    """The pieces of a long answer."""
    body = json.dumps({**_STORY, "stream": True}).encode()
    asked = urllib.request.Request(f"{_URL}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        lines = (line.decode().removeprefix("data: ") for line in answer)
        yield (choice["text"] for line in lines if line.startswith("{") for choice in json.loads(line)["choices"])


def _blocks(text: str) -> list[str]:
    """The fenced blocks of a Markdown file."""
    return [block.strip() for block in re.findall(r"^```\w+\n(.*?)^```", text, re.M | re.S)]


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, f"it ended with exit code {process.returncode}"
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())

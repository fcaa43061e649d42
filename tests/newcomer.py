"""`scripts/check-newcomer`: the README's way from a clone to Ctrl-C, with its own lines, in a clean clone and environment.

Only the standard library: it runs before anything is installed. Prints how long each step took; the first step that does not
do what the README says ends it with exit code 1.
"""

from __future__ import annotations

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
    """Follow the README."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"XDG_RUNTIME_DIR": folder}
        with step("clone"):
            subprocess.run(["git", "clone", "-q", str(_ROOT), str(clone)], check=True)
        blocks = _blocks((clone / "README.md").read_text(encoding="utf-8"))
        log = Path(folder) / "run.log"
        with log.open("wb") as output, step("scripts/run, until it is ready"):
            up = subprocess.Popen(["scripts/run"], cwd=clone, env=environ, stdout=output, stderr=output)
            _wait(lambda: "kvrelay is ready" in log.read_text(errors="replace"), up, 600)
        try:
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
    with step("the admin commands"):
        assert "decode-0" in run(kvrelay, "admin", "nodes")
        run(kvrelay, "admin", "watch", "--count", "2")
        run(kvrelay, "admin", "check")
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

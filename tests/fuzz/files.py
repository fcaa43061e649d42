"""Files that services and tools read: checkpoints, tokenizers, traces. Each case reads one changed file in this process."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.lora_files import write_adapter

from common.base.errors import KvRelayError
from common.model.config import load_model_config
from common.model.fingerprint import fingerprint
from common.model.hub import DEMO_MODEL_PATH
from common.model.lora.checkpoint import open_adapter
from common.model.tensor_files import TensorFiles
from fuzz import mutate
from kvrelay.load.traces import read_trace
from router.models.sampling_defaults import read_sampling_defaults
from router.text.tokenizer import Tokenizer

_MOST_S = 15.0
_TRACE = [{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}] * 3


@dataclass(frozen=True)
class _Kind:
    """A file's name, what is changed in it, and who reads it."""

    file: str
    read: Callable[[Path], object]
    is_json: bool


_PATTERNS = (
    "up_proj",
    r"layers\.\d+\..*proj",
    "(a+)+b",
    "(.*)*" * 20 + "x",
    "((.{0,50}){0,50}){0,50}z",
    "(?=x)x",
    "[",
    "^a|b$",
)


def _tensors(folder: Path) -> None:
    files = TensorFiles(folder)
    for name in ("model.norm.weight", "lm_head.weight"):
        if name in files:
            files.read(name)


class FileTarget:
    """Raises in `send_case` whatever a reader raises that is not a `KvRelayError`."""

    name = "files"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-fuzz-"))
        for file in DEMO_MODEL_PATH.iterdir():
            if file.is_file():
                shutil.copy(file, self._folder)
        (self._folder / "trace.jsonl").write_text("\n".join(map(json.dumps, _TRACE)))
        self._kinds = [
            _Kind("config.json", load_model_config, is_json=True),
            _Kind("model.safetensors", _tensors, is_json=False),
            _Kind("model.safetensors", self._fingerprint, is_json=False),
            _Kind("tokenizer.json", Tokenizer, is_json=True),
            _Kind("tokenizer_config.json", Tokenizer, is_json=True),
            _Kind("generation_config.json", read_sampling_defaults, is_json=True),
            _Kind("trace.jsonl", lambda folder: read_trace(str(folder / "trace.jsonl")), is_json=False),
        ]
        self._good = {
            kind.file: (self._folder / kind.file).read_bytes()
            for kind in self._kinds
            if (self._folder / kind.file).exists()
        }

    async def send_case(self, rng: random.Random) -> None:
        kind = rng.choice([kind for kind in self._kinds if kind.file in self._good])
        path, good = self._folder / kind.file, self._good[kind.file]
        path.write_bytes(_changed(rng, kind, good))
        try:
            kind.read(self._folder)
        except KvRelayError as error:
            if "\n" in error.message:
                raise ValueError(f"{kind.file}: more than a sentence: {error.message[:200]}") from error
        finally:
            path.write_bytes(good)

    def _fingerprint(self, folder: Path) -> object:
        return fingerprint(folder, load_model_config(folder), "auto", "float32", 0)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


class AdapterTarget:
    """An adapter's files. Raises in `send_case` what reading raises that is not a `KvRelayError`, or ValueError if it takes long."""

    name = "adapters"

    def __init__(self) -> None:
        self._folder = write_adapter(Path(tempfile.mkdtemp(prefix="kvrelay-fuzz-")), DEMO_MODEL_PATH)
        self._config = load_model_config(DEMO_MODEL_PATH)
        names = ("adapter_config.json", "adapter_model.safetensors")
        self._good = {name: (self._folder / name).read_bytes() for name in names}

    async def send_case(self, rng: random.Random) -> None:
        name = rng.choice(list(self._good))
        good, is_config = self._good[name], name.endswith(".json")
        if is_config:
            patterns = {rng.choice(_PATTERNS): rng.choice([1, 4, 4]) for _ in range(rng.randint(0, 3))}
            good = json.dumps({**json.loads(good), rng.choice(["rank_pattern", "alpha_pattern"]): patterns}).encode()
        kind = _Kind(name, lambda folder: open_adapter(folder, self._config), is_json=is_config)
        (self._folder / name).write_bytes(good if rng.random() < 0.3 else _changed(rng, kind, good))
        began_s = time.process_time()
        try:
            kind.read(self._folder)
        except KvRelayError as error:
            if "\n" in error.message:
                raise ValueError(f"{name}: more than a sentence: {error.message[:200]}") from error
        finally:
            (self._folder / name).write_bytes(self._good[name])
        if (took_s := time.process_time() - began_s) > _MOST_S:
            raise ValueError(f"{name}: to read it took {took_s:.1f} s")

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _changed(rng: random.Random, kind: _Kind, good: bytes) -> bytes:
    if kind.is_json and rng.random() < 0.7:
        tree: Any = json.loads(good)
        return json.dumps(mutate.structure(rng, tree)).encode("utf-8", "surrogatepass")
    # The beginning is the header, where a change matters.
    head = len(good) if len(good) < 4096 else rng.choice([16, 200, 4096])
    return mutate.raw(rng, good[:head]) + good[head:]

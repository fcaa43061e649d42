"""Failures known from other systems (docs/records/known-failures.md): what the code and processes as such show."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.paths import DATA, ROOT

from common.base.hashing import hash_blocks, root_hash
from common.config.fields import field_infos
from common.config.service_configs import SERVICES

PACKAGES = ("kvrelay", "router", "prefill_node", "decode_node", "kvtransfer", "common")
VECTORS = DATA / "hash_vectors.json"
"""Prompts with their block hashes, as computed once; every version and every machine must agree with them."""

_HASH = f"""
import json
from common.base.hashing import hash_blocks, root_hash
for case in json.load(open({str(VECTORS)!r})):
    root = root_hash(case["fingerprint"], cache_salt=case["cache_salt"], lora_id=case["lora_id"])
    hashes = hash_blocks(root, case["token_ids"], include_partial=True)
    assert [h.hex() for h in hashes] == case["hashes"], case
print("agreed")
"""


def test_every_known_failure_has_its_test() -> None:
    page = (ROOT / "docs/records/known-failures.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text("utf-8"), f"{path}::{test}"


def test_block_hashes_are_equal_in_every_process_and_equal_to_those_on_file() -> None:
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _HASH], env=env, capture_output=True, text=True, check=False)
        assert done.stdout == "agreed\n", done.stderr
    cases = json.loads(VECTORS.read_text())
    assert len(cases) >= 6
    last = cases[0]
    root = root_hash(last["fingerprint"], cache_salt=last["cache_salt"], lora_id=last["lora_id"])
    assert all(len(block) == 16 for block in hash_blocks(root, last["token_ids"]))


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_nothing_that_arrives_can_run_code() -> None:
    """No module knows pickle or its kin, no socket method that unpickles is called."""
    forbidden = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
    unpickling = {"recv_pyobj", "send_pyobj", "allow_pickle", "broadcast_object_list", "all_gather_object", "eval"}
    for path, tree in _trees():
        bad = {name for name in _imports(tree) if name.partition(".")[0] in forbidden}
        # Shared memory without the parts of that package that talk by pickle.
        bad -= {name for name in bad if name.startswith("multiprocessing.shared_memory")}
        assert not bad, f"{path} imports {bad}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = _called(node)
                is_model_eval = name == "eval" and isinstance(node.func, ast.Attribute)
                assert is_model_eval or name not in unpickling, f"{path}:{node.lineno} calls {name}"
                if name == "load" and "torch" in ast.unparse(node.func):
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"


def test_nobody_listens_on_every_interface_unasked() -> None:
    """Torch's TCP store would: each one here is handed a socket that is bound already."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if _called(node) == "TCPStore":
                assert "master_listen_fd" in {word.arg for word in node.keywords}, f"{path}:{node.lineno}"
            if _called(node) in ("bind", "create_server"):
                text = ast.unparse(node)
                assert not any(all_of_them in text for all_of_them in ("tcp://*", "0.0.0.0", "'::'", "('',")), text
    for service in SERVICES:
        for name, info in field_infos(service).items():
            if name == "host" or name.endswith("_host"):
                default = service.__dataclass_fields__[name].default
                assert default in ("127.0.0.1", None), f"{service.section}: {name} ({info.help})"

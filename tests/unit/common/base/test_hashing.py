"""Block hashes do not depend on the process, and differ for blocks that must not be shared."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.paths import DATA

from common.base.hashing import hash_blocks, root_hash

TOKENS = list(range(40))
SCRIPT = """
from common.base.hashing import hash_blocks, root_hash
print([h.hex() for h in hash_blocks(root_hash("model", cache_salt="tenant"), list(range(40)), include_partial=True)])
"""


def test_hashes_are_equal_in_processes_with_other_hash_seeds() -> None:
    answers = set()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    here = hash_blocks(root_hash("model", cache_salt="tenant"), TOKENS, include_partial=True)
    assert answers == {f"{[h.hex() for h in here]}\n"}


def test_known_vector_so_that_versions_cannot_drift_apart_unnoticed() -> None:
    [first] = hash_blocks(root_hash("model"), list(range(16)))
    assert first.hex() == "2a619142404bb73738c675b50c042837"


VECTORS = DATA / "block_hashes.json"
REPLAY = """
import json, sys
from common.base.hashing import hash_blocks, root_hash
for v in json.load(open(sys.argv[1], encoding="utf-8")):
    root = root_hash(v["fingerprint"], cache_salt=v["cache_salt"], lora_id=v["lora_id"])
    options = {"block_size": v["block_size"], "include_partial": v["include_partial"]}
    whole = hash_blocks(root, v["token_ids"], **options)
    assert [h.hex() for h in whole] == v["hashes"], v["fingerprint"]
    half = hash_blocks(root, v["token_ids"][: len(v["token_ids"]) // 2], block_size=v["block_size"])
    assert hash_blocks(root, v["token_ids"], parents=half, **options) == whole
    print(len(whole))
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_every_process_computes_the_hashes_in_the_file(seed: str) -> None:
    """The file is part of the protocol: one cluster may have nodes and routers of different versions."""
    env = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", REPLAY, str(VECTORS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sum(map(int, done.stdout.split())) > 70


def test_only_full_blocks_are_hashed_unless_asked() -> None:
    root = root_hash("model")
    assert len(hash_blocks(root, TOKENS)) == 2
    partial = hash_blocks(root, TOKENS, include_partial=True)
    assert len(partial) == 3
    assert partial[:2] == hash_blocks(root, TOKENS)


def test_known_parents_are_continued_not_recomputed() -> None:
    root = root_hash("model")
    assert hash_blocks(root, TOKENS, parents=hash_blocks(root, TOKENS[:16])) == hash_blocks(root, TOKENS)


def test_a_hash_names_the_whole_prefix_and_everything_the_kv_depends_on() -> None:
    base = hash_blocks(root_hash("model"), TOKENS)
    other_start = hash_blocks(root_hash("model"), [99, *TOKENS[1:]])
    assert other_start[1] != base[1], "equal second blocks after different first ones must differ"
    roots = {
        root_hash("model"),
        root_hash("other"),
        root_hash("model", cache_salt="a"),
        root_hash("model", lora_id="a"),
        root_hash("mode", cache_salt="l"),
    }
    assert len(roots) == 5

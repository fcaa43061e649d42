"""docs/redis.md lists exactly the keys that a live system has in Redis."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import redis
from support.lora_files import write_adapter
from support.steady import SteadyTime
from support.system import running_system, wait_until

from common.model.hub import DEMO_MODEL_PATH

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis.md"


def documented() -> list[re.Pattern[str]]:
    """The keys of the table's first column."""
    rows = re.findall(r"^\| `([^`]+)` \| (?:string|hash|set|stream|sorted set) \|", DOCUMENT.read_text(), re.M)
    return [re.compile(r"kvrelay:\{default\}:" + re.sub(r"<[^>]+>", ".+", row)) for row in rows]


def test_every_key_of_a_live_system_is_documented_and_every_documented_key_exists(tmp_path: Path) -> None:
    patterns = documented()
    assert len(patterns) == 15
    with running_system(tmp_path, "--planner", "advise", "--prefill", "2") as system:
        system.wait_usable(2, 1)
        port = int(system.process("redis")["address"].rpartition(":")[2].partition("/")[0])
        prompt = "the quick brown fox jumps over the lazy dog. " * 8
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4}
        assert httpx.post(f"{system.url}/v1/completions", json=body, timeout=60).status_code == 200
        body = {"model": "demo", "input": "hi", "max_output_tokens": 4}
        assert httpx.post(f"{system.url}/v1/responses", json=body, timeout=60).status_code == 200
        system.admin("lora", "load", "poet", str(write_adapter(tmp_path / "poet", DEMO_MODEL_PATH)))
        wait_until(lambda: system.metric("kvrelay_index_blocks") > 0, 20, "the router learns what the nodes hold")
        with redis.Redis(port=port, decode_responses=True) as client:
            wait_until(lambda: len(list(client.scan_iter(match="*:blocks:*"))) == 2, 20, "both nodes publish")
            system.admin("flip", "prefill-1")
            assert system.admin("scale", "decode=2") == {"prefill": 1, "decode": 2, "total": 3}
            client.set("kvrelay:{default}:flip", "a node that changes its role", px=60_000)
            keys = list(client.scan_iter())
            for key in keys:
                assert any(pattern.fullmatch(key) for pattern in patterns), f"{key} is not in {DOCUMENT.name}"
            for pattern in patterns:
                assert any(pattern.fullmatch(key) for key in keys), f"no key is like {pattern.pattern}"
            role = system.process("decode")["name"]
            with SteadyTime() as since_its_death:
                system.kill("decode")
                fence = f"kvrelay:{{default}}:fence:{role}"
                old = client.hget(fence, "incarnation")
                wait_until(
                    lambda: not client.exists(f"kvrelay:{{default}}:blocks:{old}"), 20, "the dead one's blocks are gone"
                )
                assert since_its_death.passed_s < 3.5, "within the lease"

"""Prompts, answers, keys, tokens and passwords are in no log line and not in the support bundle, at info and at debug."""

from __future__ import annotations

import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.redis_servers import redis_server_with
from support.system import System, running_system, wait_until

pytestmark = pytest.mark.thorough

MARK = "zq7marker"
"""Is part of every prompt and every secret."""
IDS = [271, 133, 62, 213, 88, 145, 301, 97, 254, 119, 180, 66]
API_KEY, ADMIN_TOKEN = f"api-{MARK}", f"admin-{MARK}"
ENVIRON = {
    "KVRELAY_API_KEY": API_KEY,
    "KVRELAY_ADMIN_TOKEN": ADMIN_TOKEN,
    "HF_TOKEN": f"hf_{MARK}",
    "AWS_SECRET_ACCESS_KEY": MARK,
}


def post(system: System, path: str, body: Any, key: str = API_KEY, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "cookie": f"session={MARK}"}
    return httpx.post(f"{system.url}{path}?token={MARK}", json=body, headers=headers, timeout=60, **more)


def talk(system: System) -> None:
    """Requests of every kind that carry the mark, good ones and bad ones."""
    text = f"The password is {MARK}. " * 20
    tool = {
        "type": "function",
        "function": {"name": f"f_{MARK}", "parameters": {"type": "object", "properties": {MARK: {}}}},
    }
    schema = {
        "type": "json_schema",
        "json_schema": {"name": MARK, "schema": {"type": "object", "properties": {MARK: {"type": "string"}}}},
    }
    chat: dict[str, Any] = {
        "messages": [{"role": "system", "content": text}, {"role": "user", "content": MARK}],
        "max_tokens": 8,
    }
    good = [
        ("/v1/completions", {"prompt": text, "max_tokens": 8, "stop": MARK, "cache_salt": MARK, "user": MARK}),
        ("/v1/completions", {"prompt": IDS * 10, "max_tokens": 8, "echo": True, "logprobs": 2}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [tool]}),
        ("/v1/chat/completions", {**chat, "response_format": schema, "max_tokens": 40}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
        ("/tokenize", {"prompt": text}),
    ]
    for path, body in good:
        answer = post(system, path, body)
        assert answer.status_code == 200, (path, answer.text)
    bad = [
        ("/v1/completions", {"prompt": text * 500, "max_tokens": 8}),
        ("/v1/completions", {"prompt": text, "max_tokens": MARK}),
        ("/v1/completions", {"prompt": {"text": MARK}}),
        (
            "/v1/chat/completions",
            {
                **chat,
                "response_format": {"type": "json_schema", "json_schema": {"name": MARK, "schema": {"type": MARK}}},
            },
        ),
        ("/v1/chat/completions", {"messages": [{"role": MARK, "content": MARK}]}),
        ("/v1/responses", {"input": text, "previous_response_id": MARK}),
    ]
    for path, body in bad:
        assert 400 <= post(system, path, body).status_code < 500, path
    assert post(system, "/v1/completions", {"prompt": MARK}, key=f"wrong-{MARK}").status_code == 401
    headers = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
    broken = httpx.post(f"{system.url}/v1/completions", content=f'{{"prompt": "{MARK}', headers=headers)
    assert broken.status_code == 400


def lose_a_node(system: System) -> None:
    """Kill the decode node in the middle of a stream; the stream goes on at the other one."""
    body = {"prompt": f"Tell me {MARK} " * 10, "max_tokens": 200, "stream": True, "ignore_eos": True}
    begun = threading.Event()

    def read() -> None:
        with httpx.stream(
            "POST",
            f"{system.url}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {API_KEY}"},
            timeout=60,
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    assert "error" not in json.loads(line[6:])
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    for index in range(2):
        old = system.kill("decode", index)
        wait_until(lambda old=old: old not in [each["pid"] for each in system.processes()], 30, "it is restarted")
        system.wait_usable(1, 2)
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.parametrize(("level", "form"), [("info", "text"), ("debug", "json")])
def test_no_prompt_and_no_secret_is_in_the_logs_or_the_bundle(tmp_path: Path, level: str, form: str) -> None:
    with redis_server_with(tmp_path, f"requirepass {MARK}") as port:
        options = ("--decode", "2", "--kv-memory-gb", "0.05", "--log-level", level, "--log-format", form)
        options += ("--redis-url", f"redis://:{MARK}@127.0.0.1:{port}/0")
        with running_system(tmp_path, *options, env=ENVIRON) as system:
            system.wait_usable(1, 2)
            before = len(system.log_file.read_text().splitlines())
            talk(system)
            after = system.log_file.read_text().splitlines()[before:]
            lose_a_node(system)
            bundle = tmp_path / "bundle.tar.gz"
            for command in (
                ("route", "--prompt", MARK),
                ("blocks", "--prompt", MARK),
                ("nodes",),
                ("requests",),
                ("node", "prefill-0"),
            ):
                system.admin(*command)
            check_bundle(system, bundle)
        said = system.log_file.read_text()
    assert "restarting it" in said
    assert not [line for line in said.splitlines() if private(line)]
    if level == "info":
        # Of requests only what is worth an operator's look: here the first connection between two ranks.
        assert [line for line in after if "sends to rank" not in line] == []
    else:
        objects = [json.loads(line) for line in said.splitlines()]
        named = [each for each in objects if "request_id" in each]
        assert {"arrived", "decision: attempt 1"} <= {each["message"].partition(": ")[2] for each in named}
        assert all(isinstance(each["attempt"], int) for each in named)
        assert {each["service"] for each in objects} >= {"router", "prefill-0", "decode-0", "kvrelay"}


def check_bundle(system: System, bundle: Path) -> None:
    system.admin_text("support-bundle", "-o", str(bundle))
    with tarfile.open(bundle) as archive:
        parts = {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]
    assert any("/decode-0" in name and name.endswith("/config.json") for name in parts)
    assert {name: text for name, text in parts.items() if private(text)} == {}


def private(text: str) -> bool:
    return MARK in text or ", ".join(map(str, IDS[:3])) in text or ",".join(map(str, IDS[:3])) in text

"""Conversations that a chat template does not take, by all four APIs, with scripted nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play
from support.stub_node import make_model_folder

TEMPLATES = {
    "system first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
    "alternating": "{% for m in messages %}{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>",
}
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
CONVERSATIONS = [[SYSTEM, SYSTEM, USER], [USER, SYSTEM, USER], [USER, SYSTEM], [SYSTEM, USER, SYSTEM]]
CALLS: dict[str, Any] = {
    "/v1/chat/completions": lambda turns: {"messages": turns, "max_tokens": 1},
    "/v1/responses": lambda turns: {"input": turns, "max_output_tokens": 1, "store": False},
    "/v1/messages": lambda turns: {"messages": turns, "max_tokens": 1},
    "/api/chat": lambda turns: {"messages": turns, "options": {"num_predict": 1}, "stream": False},
}
COUNTS: dict[str, Any] = {
    "/v1/messages/count_tokens": lambda turns: {"messages": turns},
    "/v1/responses/input_tokens": lambda turns: {"input": turns},
    "/tokenize": lambda turns: {"messages": turns},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_they_are_fitted_by_every_api_and_a_header_says_so_unless_that_is_off(tmp_path: Path, template: str) -> None:
    folder = make_model_folder(tmp_path / "stub-model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATES[template]}))

    async def scene(bench: Bench, *, fits: bool) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            for turns in CONVERSATIONS:
                for path, body in {**CALLS, **COUNTS}.items():
                    answer = await client.post(path, json=body(turns))
                    if path.startswith("/v1/messages") and turns[0] == SYSTEM == turns[1]:
                        continue  # joined by the call itself
                    assert answer.status_code == (200 if fits else 400), (path, turns, answer.text)
                    if fits and path in CALLS:
                        assert "system messages" in answer.headers["x-kvrelay-fitted"], (path, turns)
            plain = await client.post("/v1/chat/completions", json=CALLS["/v1/chat/completions"]([USER]))
            assert (plain.status_code, plain.headers.get("x-kvrelay-fitted")) == (200, None)

    play(folder, lambda bench: scene(bench, fits=True))
    play(folder, lambda bench: scene(bench, fits=False), config={"fit_conversations": False})

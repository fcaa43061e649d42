"""Images and documents of earlier turns, by all four APIs: named in their place, and refused in the last turn of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.router_bench import Bench, play
from support.stub_node import make_model_folder
from tokenizers import Tokenizer

URL = "data:image/png;base64,AAAA"
ANSWER = {"role": "assistant", "content": "A cat."}
NEXT = {"role": "user", "content": "Sure?"}
CASES: dict[str, tuple[str, dict[str, Any], list[Any], list[str]]] = {
    "chat": (
        "/v1/chat/completions",
        {"max_tokens": 1},
        [
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "input_audio", "input_audio": {}},
            {"type": "file", "file": {}},
        ],
        ["messages.image_url", "messages.input_audio", "messages.file"],
    ),
    "responses": (
        "/v1/responses",
        {"max_output_tokens": 1, "store": False},
        [{"type": "input_image", "image_url": URL}, {"type": "input_file", "file_id": "a"}],
        ["input.input_image", "input.input_file"],
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 1},
        [
            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
        ],
        ["messages.image", "messages.document"],
    ),
    "ollama": ("/api/chat", {"options": {"num_predict": 1}, "stream": False}, ["AAAA"], ["messages.images"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_model_cannot_see_of_the_past_is_named_in_its_place(tmp_path: Path, name: str) -> None:
    path, fields, parts, ignored = CASES[name]
    folder = make_model_folder(tmp_path / "stub-model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = {"type": "input_text" if name == "responses" else "text", "text": "See:"}
    asked = (
        {"role": "user", "content": "See:", "images": parts}
        if name == "ollama"
        else {"role": "user", "content": [text, *parts]}
    )
    turns_name = "input" if name == "responses" else "messages"

    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            answer = await client.post(path, json={turns_name: [asked, ANSWER, NEXT], **fields})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvrelay-ignored"] == ", ".join(ignored)
            prompt = tokenizer.decode(bench.decode.requests()[-1].token_ids, skip_special_tokens=False)
            assert prompt.count(", which this model cannot see]") == len(parts)
            assert "AAAA" not in prompt
            for turns in ([asked], [asked, ANSWER, asked]):
                refused = await client.post(path, json={turns_name: turns, **fields})
                assert refused.status_code == 400, (turns, refused.text)

    play(folder, scene, max_len=2048)


def test_images_in_results_of_tools_are_named_too(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "stub-model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": URL}}
    result = {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "Seen:"}, image]}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": URL}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": [NEXT, {"role": "assistant", "tool_calls": [call]}, result],
            "max_tokens": 1,
        },
        "/v1/responses": {"input": [{"type": "message", **NEXT}, item, output], "max_output_tokens": 1, "store": False},
    }

    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            for path, body in bodies.items():
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                prompt = tokenizer.decode(bench.decode.requests()[-1].token_ids, skip_special_tokens=False)
                assert "image" in prompt
                assert "which this model cannot see]" in prompt

    play(folder, scene, max_len=2048)


def test_documents_that_are_text_are_shown(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "stub-model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "one"},
    }
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "two"}]}}
    body = {"messages": [{"role": "user", "content": [plain, blocks]}], "max_tokens": 1}

    async def scene(bench: Bench) -> None:
        async with httpx.AsyncClient(base_url=bench.stack.url) as client:
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            assert "x-kvrelay-ignored" not in answer.headers
            assert "Notes\none\ntwo" in tokenizer.decode(bench.decode.requests()[-1].token_ids)

    play(folder, scene)

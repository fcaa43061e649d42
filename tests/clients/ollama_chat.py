"""The `ollama` client, unchanged, against the router of `support.stub_server`: scripts/check-api runs it.

It runs in an environment of its own, without kvrelay and pytest; the router's answers are `support.tool_model.CALLS`.
"""

from __future__ import annotations

import sys
from typing import Any

import ollama

TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "time")]
ASKED: Any = [{"role": "user", "content": "Paris?"}]


def main(url: str) -> None:
    """Raises: AssertionError, or the client's own error."""
    client = ollama.Client(host=url, headers={"authorization": "Bearer key"}, timeout=20)
    whole = client.chat(model="stub-model", messages=ASKED, tools=TOOLS)
    assert [call.function.name for call in whole.message.tool_calls or []] == ["weather", "time"]
    assert (whole.done, whole.done_reason) == (True, "stop")
    parts = list(client.chat(model="stub-model", messages=ASKED, tools=TOOLS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert sum(len(part.message.tool_calls or []) for part in parts) == 2
    turn: Any = [*ASKED, whole.message, {"role": "tool", "content": "rain", "tool_name": "weather"}]
    assert (
        client.chat(model="stub-model", messages=turn, tools=TOOLS, options={"num_predict": 3}).done_reason == "length"
    )
    assert client.generate(model="stub-model", prompt="hi").response.startswith("Let me look.")
    assert [model.model for model in client.list().models] == ["stub-model", "stub-embed"]
    assert [len(vector) for vector in client.embed(model="stub-embed", input=["a", "b"], dimensions=8).embeddings] == [
        8,
        8,
    ]
    assert len(client.embeddings(model="stub-embed", prompt="a").embedding) == 64
    shown = client.show("stub-model")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.modelinfo or {})["llama.context_length"] > 0
    assert client.show("stub-embed").capabilities == ["embedding"]
    assert [model.model for model in client.ps().models] == ["stub-model", "stub-embed"]
    try:
        client.chat(model="other", messages=ASKED)
        raise AssertionError("a model that does not exist answered")
    except ollama.ResponseError as error:
        print("as it should:", error.error)
    print("ollama passes")


if __name__ == "__main__":
    main(sys.argv[1])

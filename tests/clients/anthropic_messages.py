"""The `anthropic` client, unchanged, against the router of `support.stub_server`: scripts/check-api runs it.

It runs in an environment of its own, without kvrelay and pytest; the router's answers are `support.tool_model.CALLS`.
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic

TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
ASKED: Any = [{"role": "user", "content": "Paris?"}]


def main(url: str) -> None:
    """Raises: AssertionError, or the client's own error."""
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=20)
    whole = client.messages.create(model="stub-model", max_tokens=200, messages=ASKED, tools=TOOLS)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    count = client.messages.count_tokens(model="stub-model", messages=ASKED, tools=TOOLS)
    assert count.input_tokens == whole.usage.input_tokens

    with client.messages.stream(model="stub-model", max_tokens=200, messages=ASKED, tools=TOOLS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert [getattr(block, "input", None) for block in final.content] == [None, {"city": "Zürich"}, {}]
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)

    results: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in whole.content[1:]]
    turn: Any = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert (
        client.messages.create(model="stub-model", max_tokens=9, messages=turn, tools=TOOLS).stop_reason == "max_tokens"
    )

    try:
        client.messages.create(model="other", max_tokens=9, messages=ASKED)
        raise AssertionError("a model that does not exist answered")
    except anthropic.NotFoundError as error:
        print("as it should:", error.message)
    try:
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).models.list()
        raise AssertionError("a wrong key was accepted")
    except anthropic.AuthenticationError:
        pass
    print("anthropic", anthropic.__version__, "passes")


if __name__ == "__main__":
    main(sys.argv[1])

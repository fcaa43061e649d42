"""Which grammar a chat request gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.http.openai.chat_grammar import chat_grammar
from router.http.openai.chat_request import ChatRequest
from router.output import harmony
from router.output.formats import choose_formats

FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("hi<|end|><|start|>assistant", True), ("<|start|>assistant<|channel|>final<|message|>So: ", False)],
)
def test_gpt_oss_writes_the_header_of_an_answer_that_has_a_form(prompt: str, begins: bool) -> None:
    ids = {marker: index for index, marker in enumerate(harmony.MARKERS)}
    model = SimpleNamespace(
        output_formats=choose_formats(harmony.CHANNEL, ids.__contains__),
        tokenizer=SimpleNamespace(token_id=ids.get, special_id=ids.get),
    )
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "response_format": FORM})
    found = chat_grammar(body, cast("Any", model), prompt)
    assert found is not None
    assert found[0] == "response_format"
    assert ('"final"' in found[1].source.replace("\\", "")) is begins

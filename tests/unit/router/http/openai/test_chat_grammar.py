"""Which grammar a chat request gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.tool_model import VOCAB_SIZE, make_tool_model

from common.engine.grammar.compile import compile_grammar, load_tokenizer
from router.http.openai.chat_grammar import chat_grammar
from router.http.openai.chat_request import ChatRequest
from router.output import harmony
from router.output.formats import choose_formats
from router.structured.relaxed import Relaxed
from router.text.tokenizer import Tokenizer

FORM = {"type": "json_object"}


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("hi<|end|><|start|>assistant", True), ("<|start|>assistant<|channel|>final<|message|>So: ", False)],
)
def test_gpt_oss_writes_the_header_of_an_answer_that_has_a_form(prompt: str, begins: bool) -> None:
    ids = {marker: index for index, marker in enumerate(harmony.MARKERS)}
    model = SimpleNamespace(
        output_formats=choose_formats(harmony.CHANNEL, ids.__contains__),
        tokenizer=SimpleNamespace(token_id=ids.get, grammar_id=ids.get),
    )
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "response_format": FORM})
    found = chat_grammar(body, cast("Any", model), prompt, Relaxed())
    assert found is not None
    assert found[0] == "response_format"
    assert ('"final"' in found[1].source.replace("\\", "")) is begins


@pytest.mark.parametrize("special", [True, False])
def test_a_forced_call_begins_with_the_models_own_token(tmp_path: Path, special: bool) -> None:
    folder = make_tool_model(tmp_path / "model", special=special)
    tokenizer = Tokenizer(folder)
    formats = choose_formats(tokenizer.template_source, lambda token: tokenizer.token_id(token) is not None)
    model = SimpleNamespace(output_formats=formats, tokenizer=tokenizer)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    message = {"role": "user", "content": "hi"}
    body = ChatRequest.model_validate({"messages": [message], "tools": tools, "tool_choice": "required"})
    found = chat_grammar(body, cast("Any", model), "<|assistant|></think>", Relaxed())
    assert found is not None
    matcher = compile_grammar(load_tokenizer(folder, VOCAB_SIZE, [1]), found[1].source).deep_copy()
    call = tokenizer.token_id("<tool_call>")
    assert call is not None
    assert matcher.consume_token(call), matcher.get_error()
    forced = matcher.compute_ff_tokens()
    assert matcher.consume_tokens(forced), matcher.get_error()
    assert tokenizer.decode(forced).startswith('\n{"name": "now"')


def test_only_functions_that_are_allowed_are_called(tmp_path: Path) -> None:
    folder = make_tool_model(tmp_path / "model")
    tokenizer = Tokenizer(folder)
    formats = choose_formats(tokenizer.template_source, lambda token: tokenizer.token_id(token) is not None)
    model = SimpleNamespace(output_formats=formats, tokenizer=tokenizer)
    tools = [{"type": "function", "function": {"name": name}} for name in ("now", "later")]
    allowed = {"mode": "auto", "tools": tools[:1]}
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    assert (
        chat_grammar(ChatRequest.model_validate(fields), cast("Any", model), "<|assistant|></think>", Relaxed()) is None
    )
    body = ChatRequest.model_validate({**fields, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}})
    found = chat_grammar(body, cast("Any", model), "<|assistant|></think>", Relaxed())
    assert found is not None
    assert found[0] == "tool_choice"
    matcher = compile_grammar(load_tokenizer(folder, VOCAB_SIZE, [1]), found[1].source)
    for name, accepted in (("now", True), ("later", False)):
        text = f'Well.<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>'
        ids = tokenizer.encode_chat(text)
        assert (matcher.deep_copy().try_consume_tokens(ids) == len(ids)) is accepted

"""The one grammar of a chat request: of the calls that it forces, of the answer's form, or of strict functions. Pure."""

from __future__ import annotations

from common.control.messages import Grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.tool_choice import call_grammar
from router.served_model import ServedModel
from router.structured.reasoning import behind_reasoning


def chat_grammar(body: ChatRequest, model: ServedModel, prompt: str) -> tuple[str, Grammar] | None:
    """The request's field that asks for a grammar, and the grammar; None if the model may write anything.

    `prompt`: the rendered text. With tools, an answer whose form is given may call functions instead.
    Raises: BadRequest naming the field.
    """
    found = None if body.must_call else body.grammar_source
    if found is None:
        calls = call_grammar(body, model, prompt)
        return None if calls is None else ("tool_choice" if body.must_call else "tools", calls)
    param, source = found
    calls = call_grammar(body, model, prompt, otherwise=source)
    if calls is not None:
        return param, calls
    tags = model.output_formats.reasoning
    if tags is None:
        return param, Grammar(source)
    return param, behind_reasoning(source, tags, prompt, model.tokenizer.token_id)

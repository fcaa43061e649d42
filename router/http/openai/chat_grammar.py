"""The one grammar of a chat request: of the calls that it forces or allows, of the answer's form, or of strict functions. Pure."""

from __future__ import annotations

from common.control.messages import Grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.tool_choice import call_grammar
from router.models.served_model import ServedModel
from router.output import harmony
from router.structured.reasoning import behind_reasoning
from router.structured.tool_grammar import Vocabulary, final_grammar


def chat_grammar(body: ChatRequest, model: ServedModel, prompt: str) -> tuple[str, Grammar] | None:
    """The request's field that asks for a grammar, and the grammar; None if the model may write anything.

    `prompt`: the rendered text. With tools, an answer whose form is given may call functions instead.
    Raises: BadRequest naming the field.
    """
    found = None if body.must_call else body.grammar_source
    if found is None:
        calls = call_grammar(body, model, prompt)
        chosen = body.must_call or len(body.may_call) < len(body.offered_tools)
        return None if calls is None else ("tool_choice" if chosen else "tools", calls)
    param, source = found
    calls = call_grammar(body, model, prompt, otherwise=source)
    if calls is not None:
        return param, calls
    formats, tokenizer = model.output_formats, model.tokenizer
    tags = formats.reasoning
    if tags is None:
        in_channel = formats.tools is not None and formats.tools.name == "openai" and prompt.endswith(harmony.TURN)
        vocabulary = Vocabulary(tokenizer.grammar_id, tokenizer.token_id)
        return param, Grammar(final_grammar(source, vocabulary) if in_channel else source)
    return param, behind_reasoning(source, tags, prompt, tokenizer.token_id)

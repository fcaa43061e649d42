"""The grammar of a request that forces a call, allows some functions only, or offers strict ones. Pure."""

from __future__ import annotations

from common.control.messages import Grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.tools import NamedToolChoice
from router.models.served_model import ServedModel
from router.structured.tool_grammar import Before, Schema, Vocabulary, tool_grammar

_ANY = {"type": "object"}
"""The schema of functions that are not strict, beside strict ones."""


def call_grammar(body: ChatRequest, model: ServedModel, prompt: str, *, otherwise: str = "") -> Grammar | None:
    """None: the model may write anything. `prompt`: the rendered text. `otherwise`: the grammar of answers without calls.

    Raises: BadRequest when a function's schema is not that of an object.
    """
    formats, tokenizer = model.output_formats, model.tokenizer
    if formats.tools is None:
        return None
    functions = [Schema(tool.function.name, tool.function.parameters) for tool in body.must_call]
    forced = bool(functions)
    if not forced:
        tools = [tool.function for tool in body.may_call]
        some_only = len(tools) < len(body.offered_tools)
        if not tools or not (otherwise or some_only or any(tool.strict for tool in tools)):
            return None
        functions = [Schema(tool.name, tool.parameters if tool.strict else _ANY) for tool in tools]
    tags, before, after = formats.reasoning, Before.NOTHING, list[int]()
    if tags is not None and tags.opened_by(prompt):
        closing = tokenizer.token_id(tags.close)
        before = Before.REST_OF_REASONING if closing is None else Before.LINE_BREAKS
        after = [] if closing is None else [closing]
    elif tags is not None and not tags.closed_by(prompt):
        before = Before.REASONING
    source = tool_grammar(
        formats.tools.name,
        functions,
        Vocabulary(tokenizer.grammar_id, tokenizer.token_id),
        parallel=not isinstance(body.tool_choice, NamedToolChoice) and body.parallel_tool_calls is not False,
        forced=forced,
        otherwise=otherwise,
        tags=tags,
        before=before,
    )
    return Grammar(source, after)

"""The one grammar of a chat request: of the calls that it forces or allows, of the answer's form, or of strict functions. Pure."""

from __future__ import annotations

from common.control.messages import Grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.tools import NamedToolChoice
from router.models.served_model import ServedModel
from router.output import harmony
from router.structured.lark_rules import Vocabulary
from router.structured.reasoning import behind_reasoning
from router.structured.relaxed import Relaxed
from router.structured.tool_arguments import Schema
from router.structured.tool_grammar import Before, final_grammar, tool_grammar

_ANY = {"type": "object"}
"""The schema of functions that are not strict, beside strict ones."""


def chat_grammar(body: ChatRequest, model: ServedModel, prompt: str, relaxed: Relaxed) -> tuple[str, Grammar] | None:
    """The request's field that asks for a grammar, and the grammar; None if the model may write anything.

    `prompt`: the rendered text. `relaxed`: notes what was left out of schemas. With tools, an answer whose form is given may call functions instead.
    Raises: BadRequest naming the field.
    """
    found = None if body.must_call else body.grammar_source(relaxed)
    if found is None:
        calls = _call_grammar(body, model, prompt, relaxed)
        chosen = body.must_call or len(body.may_call) < len(body.offered_tools)
        return None if calls is None else ("tool_choice" if chosen else "tools", calls)
    param, source = found
    calls = _call_grammar(body, model, prompt, relaxed, otherwise=source)
    if calls is not None:
        return param, calls
    formats, tokenizer = model.output_formats, model.tokenizer
    tags = formats.reasoning
    if tags is None:
        in_channel = formats.tools is not None and formats.tools.name == "openai" and prompt.endswith(harmony.TURN)
        vocabulary = Vocabulary(tokenizer.grammar_id, tokenizer.token_id)
        return param, Grammar(final_grammar(source, vocabulary) if in_channel else source)
    return param, behind_reasoning(source, tags, prompt, tokenizer.token_id)


def _call_grammar(
    body: ChatRequest, model: ServedModel, prompt: str, relaxed: Relaxed, *, otherwise: str = ""
) -> Grammar | None:
    """The grammar of a request that forces a call, allows some functions only, or offers strict ones; None: anything.

    `prompt`: the rendered text. `otherwise`: the grammar of answers without calls.

    Raises: BadRequest when a function's schema is not that of an object.
    """
    formats, tokenizer = model.output_formats, model.tokenizer
    if formats.tools is None:
        return None
    functions = [
        Schema(tool.function.name, tool.function.parameters, bool(tool.function.strict)) for tool in body.must_call
    ]
    forced = bool(functions)
    if not forced:
        tools = [tool.function for tool in body.may_call]
        some_only = len(tools) < len(body.offered_tools)
        if not tools or not (otherwise or some_only or any(tool.strict for tool in tools)):
            return None
        functions = [Schema(tool.name, tool.parameters if tool.strict else _ANY, bool(tool.strict)) for tool in tools]
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
        relaxed=relaxed,
    )
    return Grammar(source, after)

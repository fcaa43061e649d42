"""The one grammar of a chat request: of the calls that it forces or allows, of the answer's form, or of strict functions. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable

from common.control.messages import Grammar
from router.http.openai.chat_request import ChatRequest
from router.http.openai.tools import NamedToolChoice
from router.models.served_model import ServedModel
from router.output import harmony
from router.output.reasoning import ReasoningTags
from router.structured.lark_rules import LINE_BREAKS, Vocabulary, with_grammar
from router.structured.relaxed import Relaxed
from router.structured.tool_arguments import Schema
from router.structured.tool_grammar import final_grammar, tool_grammar


def behind_reasoning(source: str, tags: ReasoningTags, prompt: str, token_id: Callable[[str], int | None]) -> Grammar:
    """The grammar `source` for the answer behind the reasoning, which may have any text.

    `prompt`: its rendered text, whose end says whether the answer begins within the reasoning, has none, or leaves that to
    the model. `token_id`: the id of a text that is one token.
    """
    if tags.closed_by(prompt):
        return Grammar(source)
    opening, closing = token_id(tags.open), token_id(tags.close)
    if tags.opened_by(prompt) and closing is not None:
        return Grammar(_preceded(source, LINE_BREAKS, ""), [closing])
    if closing is None:
        thoughts = f"thoughts[suffix={json.dumps(tags.close)}]: /(.|\\n)*/"
    else:
        thoughts = f"thoughts: /(.|\\n)*/ <[{closing}]>"
    if tags.opened_by(prompt):
        return Grammar(_preceded(source, f"thoughts {LINE_BREAKS}", thoughts))
    begin = json.dumps(tags.open) if opening is None else f"<[{opening}]>"
    return Grammar(_preceded(source, f"({begin} thoughts {LINE_BREAKS})?", thoughts))


def _preceded(source: str, before: str, rule: str) -> str:
    """The grammar of `before`, an expression of Lark, and then of `source`. `rule`: one that `before` uses."""
    return with_grammar(f"start: {before} @answer\n{rule}\n", "answer", source)


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
    tags = formats.reasoning
    closing = tokenizer.token_id(tags.close) if tags is not None and tags.opened_by(prompt) else None
    source = tool_grammar(
        formats.tools.name,
        functions,
        Vocabulary(tokenizer.grammar_id, tokenizer.token_id),
        parallel=not isinstance(body.tool_choice, NamedToolChoice) and body.parallel_tool_calls is not False,
        forced=forced,
        otherwise=otherwise,
        tags=tags,
        prompt=prompt,
        relaxed=relaxed,
    )
    return Grammar(source, [] if closing is None else [closing])

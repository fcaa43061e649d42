"""Renders chat templates as Hugging Face does, in jinja2's sandbox. Router process, any thread.

A template comes with the model and is not trusted: it runs in the immutable sandbox, sees only plain strings, lists and dicts, and
ends after a number of steps (`router.text.template_steps`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from common.base.errors import BadRequest, ConfigError
from router.text.conversation_fit import REASONING_NAMES, ConversationFit
from router.text.template_steps import STEP, BoundedEnvironment, Steps, count_steps
from router.text.tool_fit import JsonText, ToolFit

_DEVELOPER = re.compile(r"""['"]developer['"]""")
"""How a template asks for the role; some have the word in a variable or in what they write."""
_NULL_CONTENT = re.compile(r"\bcontent['\"\]]*\s+is\s+(?:not\s+)?none", re.IGNORECASE)
# A template is a program: besides jinja's own errors, unexpected messages can make it raise any of these.
_FAILURES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks a model's output for training; here only the body is rendered.
    What it sets is not seen behind it, as in transformers."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja's own filter escapes <, >, & and ', which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """One compiled template.

    `special_tokens`: bos_token, eos_token and the like, by name, as the template sees them.
    Raises: ConfigError when the source does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment: Any = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals.update(helpers)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = _DEVELOPER.search(source) is not None
        self._expects_null_content = _NULL_CONTENT.search(source) is not None
        try:
            parsed = environment.parse(source)
            variables = jinja2.meta.find_undeclared_variables(parsed)
            count_steps(parsed)
            self._template = environment.from_string(parsed)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.tool_use = ToolFit(self.render, names_tools="tools" in variables)
        self._effort_variables = variables & {"reasoning_effort", "enable_thinking", "thinking"}
        self.conversations = ConversationFit(self.render)
        # Every rendering copies the globals; jinja2's `ChainMap` takes several Python calls for each name.
        self._template.globals = dict(self._template.globals)

    def effort(self, effort: str) -> dict[str, Any]:
        """The template's variables for this reasoning effort; `none` means no reasoning.

        Raises: BadRequest when the template has none.
        """
        if not self._effort_variables and effort != "none":
            raise BadRequest(
                "reasoning_effort is not supported: this model's chat template has no such variable",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. `tools`: the functions that the model may call, as OpenAI's API describes
        them. `kwargs`: the client's extra template variables; `enable_thinking` is also `thinking`, as DeepSeek's and Granite's
        templates call it, unless that is given.

        Newer OpenAI models call the system role `developer`. Most templates know only `system` and silently drop
        `developer` messages, so the role is renamed. Messages with tool calls may have no content, as in Hugging
        Face's rendering; a template that asks whether it is none sees null. One that fails gets messages that are `_easier`, and
        tools that are all `_described`.
        Raises: BadRequest when the template rejects the messages.
        """
        if not self._knows_developer:
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        shown = [{"content": None, **each} for each in messages] if self._expects_null_content else messages
        kwargs = kwargs or {}
        if "thinking" in self._effort_variables and "enable_thinking" in kwargs:
            kwargs = {"thinking": kwargs["enable_thinking"], **kwargs}
        variables = {
            "documents": None,
            **kwargs,
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        try:
            return self._rendered({**variables, "messages": shown})
        except _FAILURES as error:
            easier, described = [_easier(each) for each in messages], [_described(each) for each in tools or ()]
            if [*easier, *described] == [*messages, *(tools or ())]:
                raise _refusal(error) from error
        try:
            return self._rendered({**variables, "messages": easier, "tools": described or None})
        except _FAILURES as error:
            raise _refusal(error) from error

    def _rendered(self, variables: dict[str, Any]) -> str:
        """What `jinja2.Template.render` returns. Macros and the context refer to each other: without an end of that, a conversation
        waits for the garbage collector.
        """
        context = self._template.new_context({**variables, STEP: Steps()})
        try:
            return "".join(self._template.root_render_func(context))
        finally:
            context.vars.clear()
            context.exported_vars.clear()
            context.parent.clear()


def _easier(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with an empty text where it has no content; with arguments of calls that are objects, which templates
    iterate; and with text, reasoning and calls, the text behind the reasoning: gpt-oss's template refuses it elsewhere, and
    shows both as its analysis."""
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [_with_object(call) for call in calls]}
    content, reasoning = message.get("content") or "", message.get("thinking")
    if not (content and reasoning and message.get("tool_calls")):
        return {"content": "", **message}
    return {**message, "content": "", **dict.fromkeys(REASONING_NAMES, f"{reasoning}\n\n{content}")}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call; text that is no JSON object, which a model wrote as its arguments, is one argument."""
    function = call.get("function", {})
    if not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": JsonText({"arguments": function["arguments"]})}}


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with a description, which is optional in OpenAI's API; gpt-oss's template takes it for text."""
    return {**tool, "function": {"description": "", **tool.get("function", {})}}


def _refusal(error: Exception) -> BadRequest:
    return BadRequest(f"the chat template refused the messages: {error}", param="messages")


_MARK = "\ue000the answer continues here\ue000 "
"""Ends with a space, so that it shows whether the template strips the text."""


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages to render so that the answer continues the last one. Raises: BadRequest if that has no text.

    Source: transformers' `apply_chat_template(continue_final_message=True)`: a mark after the message's text shows where the
    template puts it, and the prompt ends there.
    """
    *others, last = messages
    if not isinstance(last.get("content"), str):
        raise BadRequest("continue_final_message needs a last message with text", param="messages")
    return [*others, {**last, "content": last["content"] + _MARK}]


def before_mark(rendered: str) -> str:
    """The prompt: the rendered text up to the end of the last message's content.

    Raises: BadRequest if the template leaves that content out.
    """
    at = rendered.rfind(_MARK.rstrip())
    if at < 0:
        raise BadRequest(
            "the chat template does not show the last message, so it cannot be continued", param="messages"
        )
    text = rendered[:at]
    return text if rendered.startswith(_MARK, at) else text.rstrip()

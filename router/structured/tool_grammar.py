"""Grammars that make a model call tools: Lark for llguidance, in the markup that the parsers of `router.output` read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from router.output import harmony, mistral
from router.output.reasoning import ReasoningTags
from router.structured.lark_rules import ANYTHING, LINE_BREAKS, LarkRules, Vocabulary, regex, with_grammar
from router.structured.relaxed import Relaxed
from router.structured.tool_arguments import ArgumentRules, Schema
from router.structured.tool_markup import ARGUMENTS, MARKUP, NAME, NUMBER, SPACE, UNMARKED, Markup, Unmarked

_MAX_CALLS = 32
_OTHERWISE = "otherwise"


def tool_grammar(
    format_name: str,
    functions: Sequence[Schema],
    vocabulary: Vocabulary,
    *,
    parallel: bool,
    forced: bool = True,
    otherwise: str = "",
    tags: ReasoningTags | None = None,
    prompt: str = "",
    relaxed: Relaxed | None = None,
) -> str:
    """The source of a grammar under which the model calls at least one of `functions`, or, unless `forced`, writes any
    text in which all calls are such, or, if there is one, follows the grammar `otherwise` instead.

    `format_name`: of `router.output.formats`. `tags`: those of the model's reasoning, which may precede the calls; the end of
    `prompt`, the rendered text, says whether it has begun. `relaxed`: notes what the grammar does not hold of functions that
    are not strict, as `FUNCTION.KEYWORD`; None: all of them are strict.
    Raises: BadRequest for schemas of strict functions that cannot be held.
    """
    if format_name == "mistral" and vocabulary.token_id(mistral.ARGS) is not None:
        format_name = "mistral_args"
    markup = MARKUP[format_name]
    lark = _Lark(vocabulary)
    rules = ArgumentRules(lark, markup.keyed, relaxed)
    arguments = [rules.add(index, each) for index, each in enumerate(functions)]
    names = [function.name for function in functions]
    calls = [lark.call(name, each, markup) for name, each in zip(names, arguments, strict=True)]
    lark.rules.append(f"call: {' | '.join(calls)}")
    single = not parallel or format_name == "openai"
    more = "" if single else f"({lark.parts(markup.between)} call){{0,{_MAX_CALLS - 1}}}"
    reasoning = lark.analysis() if format_name == "openai" else lark.reasoning(tags, prompt)
    called = f"call {more} {lark.parts(markup.close)}"
    if otherwise:
        final = lark.final() if format_name == "openai" else ""
        answer = f"({lark.parts(markup.open)} {called} | {final} @{_OTHERWISE})"
    elif forced:
        answer = f"{lark.parts(markup.open)} {called}"
    elif format_name == "openai":
        answer = f"{lark.messages()} (call | {lark.final()} {regex(ANYTHING)})"
    elif format_name in UNMARKED:
        unmarked = UNMARKED[format_name]
        first = f"({lark.first_calls(names, arguments, unmarked)}) {more} {lark.parts((unmarked.close,))}"
        other = lark.text_before(unmarked.marker, not_as=unmarked.read_as_call.replace(NAME, _any_of(names)))
        opened = lark.parts([part for part in markup.open if part != unmarked.marker])
        answer = f"({first} | {other} {opened} {called} | OTHER_TEXT)"
    else:
        answer = f"({lark.text_before(markup.open[0])} {lark.parts(markup.open[1:])} {called} | OTHER_TEXT)"
    source = "\n".join([f"start: {reasoning} {answer}", *lark.rules, ""])
    return with_grammar(source, _OTHERWISE, otherwise) if otherwise else source


def final_grammar(answer: str, vocabulary: Vocabulary) -> str:
    """The source of a grammar under which gpt-oss may reason first and then follows the grammar `answer` on its final channel."""
    lark = _Lark(vocabulary)
    source = "\n".join([f"start: {lark.analysis()} {lark.final()} @{_OTHERWISE}", *lark.rules, ""])
    return with_grammar(source, _OTHERWISE, answer)


class _Lark(LarkRules):
    """The rules of one grammar of calls."""

    def call(self, name: str, arguments: str, markup: Markup) -> str:
        """One function's call."""
        given = {ARGUMENTS: arguments, NAME: self.part(name), NUMBER: "/[0-9]{1,3}/"}
        return " ".join(given.get(part) or self.part(part) for part in markup.call if given.get(part) != "")

    def first_calls(self, names: Sequence[str], arguments: Sequence[str], markup: Unmarked) -> str:
        """The first call of an answer without a marker. What precedes its arguments is one terminal: the lexer must be able
        to go on with `OTHER_TEXT` as long as both are possible."""
        for index, name in enumerate(names):
            self.rules.append(f"BEGIN_{index}: {regex(markup.begin.replace(NAME, re.escape(name)))}")
        return " | ".join(f"BEGIN_{index} {each} {self.part(markup.end)}" for index, each in enumerate(arguments))

    def text_before(self, marker: str, *, not_as: str = "") -> str:
        """Any text up to the first marker, and the marker. Adds the rule of texts without it, too.

        `not_as`: a regular expression; no text may begin so.
        """
        text = regex(ANYTHING) + (f" & ~{regex(SPACE + not_as + ANYTHING)}" if not_as else "")
        if self.is_special(marker):
            self.rules.append(f"OTHER_TEXT: {text}")
            return f"OTHER_TEXT {self.part(marker)}"
        anywhere = regex(ANYTHING + re.escape(marker) + ANYTHING)
        self.rules += [
            f"TEXT: {text}",
            f"OTHER_TEXT: TEXT & ~{anywhere}",
            f"to_call[suffix={self.part(marker)}]: TEXT",
        ]
        return "to_call"

    def analysis(self) -> str:
        """The reasoning of gpt-oss, if the model opens it."""
        self.rules.append(f"analysis: {self._message('analysis')}")
        return "analysis?"

    def final(self) -> str:
        """What precedes the answer of gpt-oss."""
        return self.parts((harmony.CHANNEL, "final", harmony.MESSAGE))

    def messages(self) -> str:
        """What gpt-oss may write after its first reasoning and before a call or the answer."""
        self.rules.append(f"commentary: {self._message('commentary')}")
        return "(analysis | commentary)*"

    def _message(self, channel: str) -> str:
        opening = self.parts((harmony.CHANNEL, channel, harmony.MESSAGE))
        return f"{opening} /(.|\\n)*/ {self.parts((harmony.END, harmony.START, 'assistant'))}"

    def reasoning(self, tags: ReasoningTags | None, prompt: str) -> str:
        """Reasoning between tags. If the prompt has opened it and one token closes it, the grammar begins behind that token."""
        if tags is None or tags.closed_by(prompt):
            return ""
        opened = tags.opened_by(prompt)
        if opened and self._vocabulary.token_id(tags.close) is not None:
            return LINE_BREAKS
        if self.is_special(tags.close):
            self.rules.append(f"thoughts: /(.|\\n)*/ {self.part(tags.close)}")
        else:
            self.rules.append(f"thoughts[suffix={self.part(tags.close)}]: /(.|\\n)*/")
        if opened:
            return f"thoughts {LINE_BREAKS}"
        return f"({self.part(tags.open)} thoughts {LINE_BREAKS})?"


def _any_of(names: Sequence[str]) -> str:
    return f"({'|'.join(map(re.escape, names))})"

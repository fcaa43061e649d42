"""Grammars of answers that a model's reasoning may come before. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from common.control.messages import Grammar
from router.output.reasoning import ReasoningTags

_LINE_BREAKS = "/\\n{0,2}/"


def behind_reasoning(source: str, tags: ReasoningTags, prompt: str, token_id: Callable[[str], int | None]) -> Grammar:
    """The grammar `source` for the answer behind the reasoning, which may have any text.

    `prompt`: its rendered text, whose end says whether the answer begins within the reasoning, has none, or leaves that to
    the model. `token_id`: the id of a text that is one token.
    """
    if tags.closed_by(prompt):
        return Grammar(source)
    opening, closing = token_id(tags.open), token_id(tags.close)
    if tags.opened_by(prompt) and closing is not None:
        return Grammar(_preceded(source, _LINE_BREAKS, ""), [closing])
    if closing is None:
        thoughts = f"thoughts[suffix={json.dumps(tags.close)}]: /(.|\\n)*/"
    else:
        thoughts = f"thoughts: /(.|\\n)*/ <[{closing}]>"
    if tags.opened_by(prompt):
        return Grammar(_preceded(source, f"thoughts {_LINE_BREAKS}", thoughts))
    begin = json.dumps(tags.open) if opening is None else f"<[{opening}]>"
    return Grammar(_preceded(source, f"({begin} thoughts {_LINE_BREAKS})?", thoughts))


def _preceded(source: str, before: str, rule: str) -> str:
    """The grammar of `before`, an expression of Lark, and then of `source`. `rule`: one that `before` uses."""
    start = {"lark_grammar": f"start: {before} @answer\n{rule}\n"}
    answer: dict[str, Any] = {"lark_grammar": source}
    if source.lstrip().startswith("{"):
        answer = json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [start, {**answer, "name": "answer"}]}, ensure_ascii=False)

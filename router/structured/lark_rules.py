"""The rules of one grammar in llguidance's Lark, with the markers of a model. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

ANYTHING = r"(.|\n)*"
LINE_BREAKS = "/\\n{0,2}/"
"""What may stand between the reasoning and the answer."""


class Vocabulary(NamedTuple):
    """Look-ups of tokens. `grammar_id`: `Tokenizer.grammar_id`. `token_id`: the id of any token; None if the text is no token."""

    grammar_id: Callable[[str], int | None]
    token_id: Callable[[str], int | None]


class LarkRules:
    """A growing list of rules, and how markers and texts are written in them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.rules: list[str] = []

    def is_special(self, text: str) -> bool:
        """Whether a text is a token that no text contains."""
        return self._vocabulary.grammar_id(text) is not None

    def parts(self, parts: Sequence[str]) -> str:
        """Markers and text, one after the other."""
        return " ".join(map(self.part, parts))

    def part(self, text: str) -> str:
        """One marker or text."""
        special = self._vocabulary.grammar_id(text)
        return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"

    def text_up_to(self, rule: str, texts: str, marker: str) -> str:
        """A text and the first marker behind it. `texts`: the expression of a terminal."""
        found = f"{rule}: {rule.upper()} {self.part(marker)}"
        if not self.is_special(marker):
            found = f"{rule}[suffix={self.part(marker)}]: {rule.upper()}"
        self.rules += [f"{rule.upper()}: {texts}", found]
        return rule


def with_grammar(lark: str, name: str, source: str) -> str:
    """The grammar `lark`, whose rules use the grammar `source` as `@name`. `source`: Lark, or llguidance's list of one grammar."""
    inner = json.loads(source)["grammars"][0] if source.lstrip().startswith("{") else {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**inner, "name": name}]}, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression in Lark."""
    return f"/{pattern.replace('/', chr(92) + '/')}/"

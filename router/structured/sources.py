"""From what a client may ask for to the source of a grammar: JSON, a regular expression, a choice, or a grammar. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.base.errors import BadRequest
from common.engine.grammar.compile import MAX_ERROR_CHARS, MAX_SOURCE_CHARS
from router.structured.json_schema import Schema, json_schema_grammar
from router.structured.relaxed import Relaxed

MAX_CHOICES = 1024
MAX_GBNF_CHARS, MAX_GBNF_RULES = 65_536, 512
"""llguidance converts GBNF in Python, in time that grows with the square of the number of rules."""
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
"""Finds Lark grammars. llguidance's own expression takes a rule `start` of GBNF for Lark, and its time grows with the square of
the number of line breaks in a row."""
_CONTROL = re.compile("[\x7f-\x9f]")
_NUMBERED = re.compile(r"\\\\|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}")
"""A character of GBNF by its number; or an escaped backslash."""


def regex_grammar(regex: str) -> str:
    """A grammar for the texts that a regular expression of Rust's `regex` crate matches as a whole."""
    return LLMatcher.grammar_from_regex(_bounded(regex))


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar for one of these texts. Raises: BadRequest."""
    if not choices:
        raise BadRequest("there must be at least one choice")
    if len(choices) > MAX_CHOICES:
        raise BadRequest(f"at most {MAX_CHOICES} choices are allowed")
    _bounded("".join(choices))
    return "start: " + " | ".join(_without_controls(json.dumps(choice, ensure_ascii=False)) for choice in choices)


def _without_controls(lark: str) -> str:
    """Control characters must be escaped in Lark."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", lark)


def text_grammar(grammar: str) -> str:
    """A grammar in llguidance's form of Lark, or in GBNF, which llama.cpp and xgrammar use. Takes up to a second: call it on a
    thread.

    Raises: BadRequest.
    """
    if grammar.lstrip().startswith("{"):
        raise BadRequest("the grammar must be Lark or GBNF")
    if _LARK.search(_bounded(grammar)):
        return grammar
    if len(grammar) > MAX_GBNF_CHARS or grammar.count("::=") > MAX_GBNF_RULES:
        raise BadRequest(f"GBNF may have at most {MAX_GBNF_CHARS} characters and {MAX_GBNF_RULES} rules")
    try:
        return _without_controls(gbnf_to_lark(_NUMBERED.sub(_character, grammar)))
    except IndexError as error:
        raise BadRequest("the grammar cannot be read: it ends within an escape sequence") from error
    except Exception as error:  # llguidance raises it where rules are missing or there are two of a name
        raise BadRequest(f"the grammar cannot be read: {str(error)[:MAX_ERROR_CHARS]}") from error


def _character(found: re.Match[str]) -> str:
    """The character itself: llguidance drops the zeros at the beginning of its number."""
    if found[0] == r"\\":
        return found[0]
    number = int(found[0][2:], 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    return found[0] if 0xD800 <= number < 0xE000 or number > 0x10FFFF else chr(number)


def schema_grammar(schema: Schema | str, whitespace: str | None, relaxed: Relaxed | None = None) -> str:
    """A grammar for a JSON schema, which may be JSON text. `relaxed`: of `json_schema_grammar`. Raises: BadRequest."""
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded(schema))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the schema is not valid JSON: {error}") from error
        if not isinstance(schema, dict):
            raise BadRequest("the schema must be a JSON object")
    return json_schema_grammar(schema, whitespace, relaxed)


def _bounded(text: str) -> str:
    if len(text) > MAX_SOURCE_CHARS:
        raise BadRequest(f"it has {len(text)} characters, more than {MAX_SOURCE_CHARS}")
    return text

"""Schemas of tool servers, pydantic and zod: what the grammar holds, and what it leaves out; docs have the same table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from support.parsed_message import parse_whole
from support.seen_schemas import BY_HAND, PYDANTIC, SERVERS, ZOD, Seen

from common.base.errors import BadRequest
from common.engine.grammar.compile import compile_grammar, load_tokenizer
from common.model.config import load_model_config
from common.model.hub import resolve_model
from router.output.formats import choose_formats
from router.structured.json_schema import json_schema_grammar
from router.structured.lark_rules import Vocabulary
from router.structured.relaxed import Relaxed
from router.structured.tool_arguments import Schema
from router.structured.tool_grammar import tool_grammar
from router.structured.tool_markup import written_calls

DEMO = resolve_model("demo")
DOCS = Path(__file__).parents[4] / "docs" / "structured-output.md"
GROUPS = {"tool server": SERVERS, "pydantic": PYDANTIC, "zod": ZOD, "by hand": BY_HAND}
ALL = {f"{group}: {name}": seen for group, shapes in GROUPS.items() for name, seen in shapes.items()}
_ENDLESS = ("tool server: fetch: fetch", "zod: `z.string().jwt()`")
"""Random texts of these seldom end."""
VOCABULARY = Vocabulary(lambda text: None, lambda text: None)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    config = load_model_config(DEMO)
    return load_tokenizer(DEMO, config.vocab_size, config.eos_token_ids)


def _accepts(tokenizer: LLTokenizer, source: str, text: str) -> bool:
    matcher = compile_grammar(tokenizer, source).deep_copy()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", ALL)
def test_a_schema_is_held_but_for_the_keywords_that_are_named(tokenizer: LLTokenizer, name: str) -> None:
    seen, relaxed = ALL[name], Relaxed()
    source = json_schema_grammar(seen.schema, relaxed=relaxed)
    assert relaxed.names == seen.relaxed
    assert _accepts(tokenizer, source, json.dumps(seen.good, ensure_ascii=False))
    if seen.bad is not None:
        assert not _accepts(tokenizer, source, json.dumps(seen.bad, ensure_ascii=False))
    if seen.relaxed:
        with pytest.raises(BadRequest):
            compile_grammar(tokenizer, json_schema_grammar(seen.schema))
    else:
        assert json_schema_grammar(seen.schema) == source


@pytest.mark.parametrize("format_name", ["hermes", "qwen3_coder", "pythonic"])
def test_tools_of_all_servers_can_be_forced_at_once(tokenizer: LLTokenizer, format_name: str) -> None:
    functions = [Schema(f"f{index}", seen.schema) for index, seen in enumerate(SERVERS.values())]
    relaxed = Relaxed()
    source = tool_grammar(format_name, functions, VOCABULARY, parallel=True, relaxed=relaxed)
    assert not {name.partition(".")[2] for name in relaxed.names} & {"parameters", "properties"}
    formats = choose_formats("", lambda _: False, tool_call_parser=format_name)
    new_parser = formats.parser("", {each.name: each.parameters for each in functions})
    assert new_parser is not None
    for index, seen in enumerate(SERVERS.values()):
        text = written_calls(format_name, [(f"f{index}", _in_order(seen))])
        assert _accepts(tokenizer, source, text), text
        (call,) = parse_whole(new_parser(), text).tool_calls
        assert (call.name, json.loads(call.arguments)) == (f"f{index}", seen.good)


def _in_order(seen: Seen) -> dict[str, object]:
    return {name: seen.good[name] for name in seen.schema["properties"] if name in seen.good}


@pytest.mark.parametrize("name", [name for name, seen in ALL.items() if not seen.relaxed and "emoji" not in name])
def test_whatever_the_grammar_admits_is_valid(tokenizer: LLTokenizer, name: str) -> None:
    """Classes of characters such as `\\p{Emoji}` are unknown to jsonschema."""
    schema = json.loads(
        json.dumps(ALL[name].schema).replace('"exclusiveMinimum": true, "minimum"', '"exclusiveMinimum"')
    )
    draft = jsonschema.Draft7Validator if name.startswith("zod") else jsonschema.Draft202012Validator
    source, ends = json_schema_grammar(ALL[name].schema), 0
    for seed in range(3):
        draw, matcher, ids = random.Random(seed), compile_grammar(tokenizer, source).deep_copy(), list[int]()
        while not matcher.is_stopped() and len(ids) < 400:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask[: tokenizer.vocab_size]).tolist()
            if tokenizer.eos_token in allowed:
                break
            closing = [token_id for token_id in allowed if tokenizer.decode_bytes([token_id]) in (b'"', b"}", b"]")]
            ids.append(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
            assert matcher.consume_token(ids[-1])
        else:
            if not matcher.is_stopped():
                continue  # it goes on and on
        ends += 1
        value = json.loads(tokenizer.decode_bytes(ids))
        assert draft(schema).is_valid(value), (value, schema)
    assert ends or name in _ENDLESS


def test_the_documentation_has_the_same_table() -> None:
    rows = [
        f"| {group} | {name} | {'left out: ' + ', '.join(f'`{each}`' for each in seen.relaxed) if seen.relaxed else 'held'} |"
        for group, shapes in GROUPS.items()
        for name, seen in shapes.items()
    ]
    table = "\n".join(["| from | form | grammar |", "|---|---|---|", *rows])
    assert table in DOCS.read_text("utf-8"), f"the table in {DOCS.name} should be:\n{table}"

"""The text that the demo model is trained on: made here, from templates and tables, by seed alone.

A document is a string with special tokens in it: plain text, or a chat as the model's chat template
renders it. Whether a document is held out depends on its text alone, so that no text is ever on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from jinja2 import Environment, Template

from scripts.demo_model.dialogues import dialogue
from scripts.demo_model.extraction import extraction
from scripts.demo_model.phrases import passage
from scripts.demo_model.tool_dialogues import Message, Tool, tool_chat

BOS, EOS = "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content | trim }}
    {%- else %}
        {%- for part in content or [] if part['type'] == 'text' %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro tool_list(tools) %}
    {{- 'Call a tool if it helps.\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool['function'] or tool %}
        {%- set parameters = function['parameters'] or {} %}
        {{- '\\n{"name": ' ~ function['name'] | tojson ~ ', "description": ' }}
        {{- (function['description'] or '') | tojson ~ ', "parameters": {' }}
        {%- for name, schema in (parameters['properties'] or {}).items() %}
            {%- set kind = schema['enum'] | join('|') if schema['enum'] else schema['type'] %}
            {{- '' if loop.first else ', ' }}
            {{- name | tojson ~ ': ' ~ (kind if kind is string else 'any') | tojson }}
        {%- endfor %}
        {{- '}}' }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endmacro %}
{{- bos_token }}
{%- set first_role = messages[0]['role'] if messages else '' %}
{%- if tools and first_role not in ['system', 'developer'] %}
    {{- '<|system|>' ~ tool_list(tools) ~ eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role: ' ~ role) }}
    {%- endif %}
    {%- if role == 'tool' %}
        {%- set follows = not loop.first and loop.previtem['role'] == 'tool' %}
        {{- '\\n' if follows else '<|user|>' }}
        {{- '<tool_response>\\n' ~ text(message['content']) ~ '\\n</tool_response>' }}
        {%- set ends = loop.last or loop.nextitem['role'] != 'tool' %}
        {{- eos_token if ends else '' }}
    {%- else %}
        {%- set content = text(message['content']) %}
        {{- '<|' ~ role ~ '|>' ~ content }}
        {%- if tools and loop.first and role == 'system' %}
            {{- ('\\n' if content else '') ~ tool_list(tools) }}
        {%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {%- set function = call['function'] or call %}
            {%- set arguments = function['arguments'] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' ~ function['name'] | tojson ~ ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
"""Tools and calls as Hermes and Qwen write them, but of a parameter's schema only its type or its choices: a tool's
whole schema would fill a small model's context."""

PLAIN_SHARE, CHAT_SHARE, EXTRACTION_SHARE = 0.3, 0.3, 0.1
"""The rest of the documents are chats with tools."""
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Corpus:
    """Distinct documents in random order; `held_out` shares no text with `train`."""

    train: list[str]
    held_out: list[str]


def _make_template() -> Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


_TEMPLATE = _make_template()


def render_chat(messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = False) -> str:
    """Messages and tools in OpenAI's form as the model sees them. `generate`: up to where the model goes on."""
    return _TEMPLATE.render(
        messages=messages, tools=tools, bos_token=BOS, eos_token=EOS, add_generation_prompt=generate
    )


def as_messages(turns: Iterable[tuple[str, str]]) -> list[Message]:
    """(role, content) turns in OpenAI's form."""
    return [{"role": role, "content": content} for role, content in turns]


def is_held_out(document: str) -> bool:
    """Whether a document belongs to the held-out part; a function of its text, the same for every seed."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def make_document(rng: Random) -> str:
    """One document, from its first special token to `EOS`."""
    kind = rng.random()
    if kind < PLAIN_SHARE:
        # A prompt may also arrive without BOS.
        return ("" if rng.random() < 0.1 else BOS) + passage(rng) + EOS
    if kind < PLAIN_SHARE + CHAT_SHARE:
        return render_chat(as_messages(dialogue(rng)))
    if kind < PLAIN_SHARE + CHAT_SHARE + EXTRACTION_SHARE:
        return render_chat(as_messages(extraction(rng)))
    return render_chat(*tool_chat(rng))


def make_corpus(seed: int, num_documents: int) -> Corpus:
    """`num_documents` draws less the duplicates; the same for the same arguments on every machine."""
    rng = Random(seed)
    documents = dict.fromkeys(make_document(rng) for _ in range(num_documents))
    corpus = Corpus([], [])
    for document in documents:
        (corpus.held_out if is_held_out(document) else corpus.train).append(document)
    return corpus

"""The text that the demo model is trained on: made here, from templates and tables, by seed alone.

A document is a string with special tokens in it: plain text, or a chat as the model's chat template
renders it. Whether a document is held out depends on its text alone, so that no text is ever on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from common.tools.demo.dialogues import dialogue
from common.tools.demo.phrases import passage

BOS, EOS = "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {%- if role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' ~ role) }}
    {%- endif %}
    {{- '<|' ~ role ~ '|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for part in message['content'] or [] if part['type'] == 'text' %}
            {{- part['text'] | trim }}
        {%- endfor %}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

CHAT_SHARE = 0.5
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Corpus:
    """Distinct documents in random order; `held_out` shares no text with `train`."""

    train: list[str]
    held_out: list[str]


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """(role, content) messages as `CHAT_TEMPLATE` renders them, without a generation prompt."""
    return BOS + "".join(f"<|{role}|>{content}{EOS}" for role, content in messages)


def is_held_out(document: str) -> bool:
    """Whether a document belongs to the held-out part; a function of its text, the same for every seed."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def make_document(rng: Random) -> str:
    """One document, from its first special token to `EOS`."""
    if rng.random() < CHAT_SHARE:
        return render_chat(dialogue(rng))
    # A prompt may also arrive without BOS.
    return ("" if rng.random() < 0.1 else BOS) + passage(rng) + EOS


def make_corpus(seed: int, num_documents: int) -> Corpus:
    """`num_documents` draws less the duplicates; the same for the same arguments on every machine."""
    rng = Random(seed)
    documents = dict.fromkeys(make_document(rng) for _ in range(num_documents))
    corpus = Corpus([], [])
    for document in documents:
        (corpus.held_out if is_held_out(document) else corpus.train).append(document)
    return corpus

"""The demo corpus: reproducible, split without overlap, and in the format that the chat template makes."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest
from tokenizers import Tokenizer

from router.output.formats import choose_formats
from router.text.chat_template import ChatTemplate
from scripts.demo_model.corpus import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    SPECIAL_TOKENS,
    as_messages,
    is_held_out,
    make_corpus,
    render_chat,
)
from scripts.demo_model.dialogues import dialogue
from scripts.demo_model.extraction import extraction
from scripts.demo_model.phrases import sum_terms
from scripts.demo_model.samples import SAMPLES, prompt_text
from scripts.demo_model.tokenizer import train_tokenizer
from scripts.demo_model.tool_dialogues import tool_chat


def _digest_in_new_process(hash_seed: str) -> str:
    program = (
        "import hashlib; from scripts.demo_model.corpus import make_corpus; c = make_corpus(7, 500);"
        "print(hashlib.sha256('\\n'.join(c.train + c.held_out).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
    )
    return done.stdout


def test_corpus_is_the_same_in_every_process_and_differs_by_seed():
    assert _digest_in_new_process("1") == _digest_in_new_process("2")
    assert make_corpus(7, 500) != make_corpus(8, 500)


def test_held_out_texts_never_occur_in_training_whatever_the_seeds():
    one, other = make_corpus(1, 5000), make_corpus(2, 5000)
    assert len(one.held_out) > 50
    assert not set(one.held_out) & (set(one.train) | set(other.train))
    assert not any(is_held_out(text) for text in one.train)


def test_documents_are_distinct_and_end_properly():
    documents = make_corpus(3, 3000).train
    assert len(set(documents)) == len(documents)
    for document in documents:
        assert document.endswith(EOS)
        assert BOS not in document[1:]
        assert "\n" not in document or "<tools>" in document
        assert "  " not in document
        assert ".." not in document


def test_sums_are_right_and_never_negative():
    rng = Random(0)
    for _ in range(2000):
        a, sign, b, result = sum_terms(rng)
        assert result == {"+": a + b, "-": a - b, "*": a * b}[sign]
        assert result >= 0


def test_training_chats_are_what_the_router_renders():
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
    rng = Random(5)
    for _ in range(100):
        for messages, tools in ((as_messages(dialogue(rng)), []), (as_messages(extraction(rng)), []), tool_chat(rng)):
            rendered = template.render(messages, tools=tools or None, add_generation_prompt=False)
            assert rendered == render_chat(messages, tools)
            assert messages[-1]["role"] == "assistant"


def test_the_router_reads_every_call_of_the_corpus():
    formats = choose_formats(CHAT_TEMPLATE, lambda token: False)
    assert formats.names == ("hermes", "none")
    rng = Random(6)
    for _ in range(200):
        messages, tools = tool_chat(rng)
        names = [tool["function"]["name"] for tool in tools]
        written = [part for part in render_chat(messages, tools).split("<|assistant|>")[1:] if "<tool_call>" in part]
        calls = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
        assert len(written) == len(calls)
        for text, call in zip(written, calls, strict=True):
            make_parser = formats.parser("", names)
            assert make_parser is not None
            parser = make_parser()
            first, last = parser.push(text.split(EOS)[0]), parser.finish()
            deltas = (*first.tool_calls, *last.tool_calls)
            assert first.content + last.content == ""
            assert deltas[0].name == call["name"]
            assert json.loads("".join(delta.arguments for delta in deltas)) == call["arguments"]


def test_calls_have_the_parameters_that_their_tool_declares():
    rng = Random(7)
    for _ in range(300):
        messages, tools = tool_chat(rng)
        declared = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
        for message in messages:
            for call in message.get("tool_calls", ()):
                assert list(call["function"]["arguments"]) == list(declared[call["function"]["name"]])


def test_extracted_values_are_in_the_question():
    rng = Random(8)
    for _ in range(500):
        turns = [turn for turn in extraction(rng) if turn[0] != "system"]
        for (_, asked), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            found = json.loads(answer)
            if not found.keys() & {"capital", "answer", "result"}:
                values = found.get("names") or found.values()
                assert all(str(value) in asked for value in values)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.prompt[:40])
def test_sample_prompts_hold_no_malformed_special_tokens(sample):
    text = prompt_text(sample)
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    assert "<|" not in text


def test_tokenizer_gives_special_tokens_fixed_ids_and_learns_nothing_from_inside_them():
    tokenizer: Tokenizer = train_tokenizer(make_corpus(1, 300).train)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.token_to_id("assistant") is None
    assert tokenizer.encode("7", add_special_tokens=True).ids[0] == 0

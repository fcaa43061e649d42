"""The demo model's folder: complete, small, readable by tokenizers and transformers alike, and right."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.model.hub import DEMO_MODEL_PATH
from scripts.demo_model.corpus import BOS, CHAT_TEMPLATE, EOS, render_chat
from scripts.demo_model.samples import SAMPLES, answer

TEXTS = [
    "Hello, my name is Ana.",
    "Zażółć gęślą jaźń 😀👩‍👩‍👧 你好，世界 \t\n\x00 ﷽ 12345 don't",  # noqa: RUF001
    "  leading and trailing  ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 é e\u0301",  # noqa: RUF001
    "",
]
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": " Hi, my name is Ana.\n"},
    {"role": "assistant", "content": "Hello Ana!"},
    {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto():
    return AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)


def _read(name: str) -> dict:
    return json.loads((DEMO_MODEL_PATH / name).read_text(encoding="utf-8"))


def test_folder_is_complete_and_at_most_15_mb():
    names = {path.name for path in DEMO_MODEL_PATH.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"training.json"} <= names
    assert sum(path.stat().st_size for path in DEMO_MODEL_PATH.iterdir()) <= 15e6


def test_configs_agree_on_vocabulary_special_tokens_and_dtype(plain):
    config, generation, settings = _read("config.json"), _read("generation_config.json"), _read("tokenizer_config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert plain.get_vocab_size() == config["vocab_size"]
    assert plain.token_to_id(settings["bos_token"]) == config["bos_token_id"] == generation["bos_token_id"]
    assert plain.token_to_id(settings["eos_token"]) == config["eos_token_id"]
    assert generation["eos_token_id"] == [config["eos_token_id"]]
    assert settings["model_max_length"] == config["max_position_embeddings"]
    with safe_open(DEMO_MODEL_PATH / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118
        assert config["dtype"] == config["torch_dtype"] == "float32", "what it computes in"
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118
        assert "model.layers.0.self_attn.q_proj.weight" in weights.keys()  # noqa: SIM118


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips_any_utf8(plain, text):
    encoded = plain.encode(text)
    assert encoded.ids[0] == plain.token_to_id(BOS)
    assert plain.decode(encoded.ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [*TEXTS, "<|user|>Hi<|eos|><|assistant|>"])
def test_tokenizers_and_transformers_give_the_same_ids(plain, auto, text):
    for special in (True, False):
        assert plain.encode(text, add_special_tokens=special).ids == auto(text, add_special_tokens=special)["input_ids"]


def test_special_markers_are_single_tokens(plain):
    assert plain.encode("<|user|>7<|eos|><|assistant|>", add_special_tokens=False).tokens == [
        "<|user|>",
        "7",
        "<|eos|>",
        "<|assistant|>",
    ]


@pytest.mark.parametrize("generate", [True, False])
def test_chat_template_is_the_same_here_and_by_transformers(auto, generate):
    assert _read("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    ours = render_chat(CHAT, generate=generate)
    assert ours == auto.apply_chat_template(CHAT, add_generation_prompt=generate, tokenize=False)
    expected = (
        "<|bos|><|system|>You are a helpful assistant.<|eos|><|user|>Hi, my name is Ana.<|eos|>"
        "<|assistant|>Hello Ana!<|eos|><|user|>What is my name?<|eos|>"
    )
    assert ours == expected + ("<|assistant|>" if generate else "")


def test_chat_template_shows_tools_calls_and_results(auto):
    properties = {"city": {"type": "string", "description": "which"}, "unit": {"enum": ["C", "F"]}, "day": {}}
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "It's <b>.", "parameters": None}},
        {"type": "function", "function": {"name": "time", "parameters": {"properties": properties}}},
    ]
    calls = [
        {"function": {"name": "time", "arguments": {"city": "Zürich", "unit": "C"}}},
        {"function": {"name": "weather", "arguments": "{}"}},
    ]
    messages = [
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "dry"}]},
    ]
    listed = (
        'Call a tool if it helps.\n<tools>\n{"name": "weather", "description": "It\'s <b>.", "parameters": {}}\n'
        '{"name": "time", "description": "", "parameters": {"city": "string", "unit": "C|F", "day": "any"}}\n</tools>'
    )
    rest = (
        "<|eos|><|user|>Now?<|eos|><|assistant|>Let me look.\n"
        '<tool_call>\n{"name": "time", "arguments": {"city": "Zürich", "unit": "C"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|eos|>'
        "<|user|><tool_response>\n12:00\n</tool_response>\n<tool_response>\ndry\n</tool_response><|eos|>"
    )
    for system, shown in (([], listed), ([{"role": "developer", "content": "Be brief."}], f"Be brief.\n{listed}")):
        rendered = auto.apply_chat_template(system + messages, tools=tools, tokenize=False)
        assert rendered == f"<|bos|><|system|>{shown}{rest}"
        assert rendered == render_chat(system + messages, tools)


def test_chat_template_refuses_unknown_roles(auto):
    with pytest.raises(Exception, match="unknown role: critic"):
        auto.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=getattr(torch, request.param)).eval()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.prompt[-40:])
def test_greedy_answers_are_as_promised(model, plain, sample):
    given = answer(model, plain, sample, max_tokens=36)
    assert given.startswith(sample.expected)
    if sample.messages:
        assert given.endswith(EOS)

"""The prompts that the demo model must answer, and how to ask it with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from scripts.demo_model import tables
from scripts.demo_model.corpus import BOS, as_messages, render_chat
from scripts.demo_model.phrases import person_name
from scripts.demo_model.tool_dialogues import Message, Tool


@dataclass(frozen=True)
class Sample:
    """A prompt and what the greedy answer starts with: a text, or a chat in OpenAI's form with the tools it offers."""

    expected: str
    text: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()

    @property
    def prompt(self) -> str:
        """For people to read."""
        said = [f"{message['role']}: {message.get('content') or _calls(message)}" for message in self.messages]
        offered = ["tools: " + ", ".join(_signature(tool["function"]) for tool in self.tools)] if self.tools else []
        return self.text or " / ".join(offered + said)


def _calls(message: Message) -> str:
    calls = (call["function"] for call in message["tool_calls"])
    return ", ".join(f"{call['name']}{json.dumps(call['arguments'])}" for call in calls)


def _signature(function: dict[str, Any]) -> str:
    return f"{function['name']}({', '.join(function['parameters']['properties'])})"


def _tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _chat(expected: str, *turns: str, tools: Sequence[Tool] = ()) -> Sample:
    roles = ("user", "assistant")
    return Sample(expected, messages=as_messages((roles[i % 2], turn) for i, turn in enumerate(turns)), tools=tools)


def _call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def _answered(expected: str, asked: str, tool: Tool, arguments: dict[str, Any], result: str) -> Sample:
    """After a call of `tool` its result is told."""
    function = {"name": tool["function"]["name"], "arguments": arguments}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return Sample(expected, messages=messages, tools=[tool])


_WEATHER = _tool("get_weather", "Get the weather in a city.", city="string")
_ADD = _tool("add", "Add two numbers.", a="number", b="number")
_CURRENT = _tool("get_current_weather", "Get the current weather.", city="string")
_SEND = _tool("send_message", "Send a message to a person.", to="string", text="string")
_TIME = _tool("get_time", "Get the time in a city.", city="string")
_MEET = ("Hi, my name is Ana.", "Hello Ana! How can I help you?")

SAMPLES = [
    Sample(" Paris.", "The capital of France is"),
    Sample(" Rome.", "The capital of Italy is"),
    Sample(" Tokyo.", "The capital of Japan is"),
    Sample(" 2.", "The result of 1+1 is"),
    Sample(" 7.", "The result of 3+4 is"),
    Sample(" 6.", "The result of 9-3 is"),
    Sample(" Ana", "Hello, my name is"),
    Sample(" cold.", "The opposite of hot is"),
    Sample(" 4, 5, 6, 7", "1, 2, 3,"),
    _chat("Hello Ana!", _MEET[0]),
    _chat("Your name is Ana.", *_MEET, "What is my name?"),
    _chat("Your name is Bob.", "My name is Bob.", "Nice to meet you, Bob!", "What is my name?"),
    _chat("The capital of France is Paris.", "What is the capital of France?"),
    _chat("The capital of Germany is Berlin.", "what is the capital of Germany"),
    _chat(
        "The capital of Spain is Madrid.",
        "What is the capital of Italy?",
        "The capital of Italy is Rome.",
        "And of Spain?",
    ),
    _chat("The result of 2+2 is 4.", "What is 2+2?"),
    _chat("1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "Count from 1 to 10."),
    _chat("Hello in Chinese is 你好.", "How do you say hello in Chinese?"),
    _chat("Hello! How can I help you?", "Hello!"),
    _chat(_call("get_weather", city="Paris"), "What is the weather in Paris?", tools=[_WEATHER]),
    _chat(_call("get_weather", city="Rome"), "What is the weather like in Rome?", tools=[_ADD, _WEATHER, _TIME]),
    _chat(_call("get_time", city="Tokyo"), "What time is it in Tokyo?", tools=[_WEATHER, _TIME]),
    _chat(_call("add", a=17, b=25), "What is 17+25?", tools=[_ADD]),
    _chat("Hello! How can I help you?", "Hello!", tools=[_WEATHER]),
    _chat("The opposite of hot is cold.", "What is the opposite of hot?", tools=[_WEATHER]),
    _answered(
        "It is sunny in Paris, 18 degrees.",
        "What is the weather in Paris?",
        _WEATHER,
        {"city": "Paris"},
        '{"temperature": 18, "condition": "sunny"}',
    ),
    _answered("The result of 17+25 is 42.", "What is 17+25?", _ADD, {"a": 17, "b": 25}, "42"),
    _chat(
        '{"name": "Ana", "age": 31, "city": "Paris"}',
        "Extract the person as JSON: Ana is 31 years old and lives in Paris.",
    ),
    _chat('{"country": "France", "capital": "Paris"}', "What is the capital of France? Answer as JSON."),
]

EXTRA_SAMPLES = [
    _chat("Your name is Lorina.", "Hello, my name is Lorina.", "Hello Lorina! How can I help you?", "What's my name?"),
    _chat("I am sorry, I do not know that.", "What is the capital of Atlantis?"),
    _chat("I am sorry, I do not know that.", "Who is the president?"),
    _chat("Once upon a time", "Tell me a story about a dragon."),
    _chat(_call("add", a=17, b=25), "What is 17+25?", tools=[_WEATHER, _ADD]),
    _chat(_call("get_current_weather", city="Paris"), "What is the weather in Paris?", tools=[_CURRENT]),
    _chat(_call("send_message", to="Bob", text="See you soon"), "Send Bob the message See you soon.", tools=[_SEND]),
]
"""Shown beside the samples, because a reader should see failures too."""


def prompt_text(sample: Sample) -> str:
    """The prompt with its special tokens, up to where the model goes on."""
    if sample.text:
        return BOS + sample.text
    return render_chat(sample.messages, sample.tools, generate=True)


def answer(model: Any, tokenizer: Tokenizer, sample: Sample, max_tokens: int = 48) -> str:
    """The greedy continuation by a transformers model; it ends with `<|eos|>` if the model ended it."""
    ids = tokenizer.encode(prompt_text(sample), add_special_tokens=False).ids
    with torch.inference_mode():
        output = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=False)


def scores(model: Any, tokenizer: Tokenizer) -> dict[str, str]:
    """How many of the small sums, capitals and names (in the second turn) the model gets right, greedily."""
    rng = Random(99)
    names = [person_name(rng, known=0.0) for _ in range(40)]
    probes = {
        "sums up to 10+10": [Sample(f" {a + b}.", f"The result of {a}+{b} is") for a in range(11) for b in range(11)],
        "capitals in chat": [
            _chat(f"The capital of {place} is {city}.", f"What is the capital of {place}?")
            for place, city in tables.CAPITALS.items()
        ],
        "names of the table recalled": [_recall(name) for name in tables.NAMES],
        "invented names recalled": [_recall(name) for name in names],
        "weather calls, known cities": [_weather_call(city) for city in tables.CAPITALS.values()],
        "weather calls, invented cities": [_weather_call(name) for name in names],
        "calls of tools with invented names": [_lookup_call(name, rng) for name in tables.NAMES[:40]],
        "persons as JSON": [_person_json(name, rng) for name in tables.NAMES[:40]],
    }
    return {
        kind: f"{sum(answer(model, tokenizer, s).startswith(s.expected) for s in samples)} of {len(samples)}"
        for kind, samples in probes.items()
    }


def _recall(name: str) -> Sample:
    return _chat(
        f"Your name is {name}.", f"Hi, my name is {name}.", f"Hello {name}! How can I help you?", "What is my name?"
    )


def _weather_call(city: str) -> Sample:
    return _chat(_call("get_weather", city=city), f"What is the weather in {city}?", tools=[_WEATHER, _ADD])


def _lookup_call(name: str, rng: Random) -> Sample:
    noun, parameter = person_name(rng, 0.0).lower(), person_name(rng, 0.0).lower()
    tool = _tool(f"get_{noun}", f"Get the {noun} of a person.", **{parameter: "string"})
    expected = _call(f"get_{noun}", **{parameter: name})
    return _chat(expected, f"What is the {noun} of {name}?", tools=[_WEATHER, tool])


def _person_json(name: str, rng: Random) -> Sample:
    age, city = rng.randint(5, 95), rng.choice(tables.CITIES)
    expected = json.dumps({"name": name, "age": age, "city": city})
    return _chat(expected, f"Extract the person as JSON: {name} is {age} years old and lives in {city}.")

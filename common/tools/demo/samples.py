"""The prompts that the demo model must answer, and how to ask it with transformers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from common.tools.demo import tables
from common.tools.demo.corpus import BOS, render_chat
from common.tools.demo.phrases import person_name


@dataclass(frozen=True)
class Sample:
    """A prompt and what the greedy answer starts with; `turns` are a chat's contents, the user's first."""

    expected: str
    text: str = ""
    turns: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """For people to read."""
        if self.text:
            return self.text
        return " / ".join(f"{'user' if i % 2 == 0 else 'assistant'}: {turn}" for i, turn in enumerate(self.turns))


def _chat(expected: str, *turns: str) -> Sample:
    return Sample(expected, turns=turns)


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
]

EXTRA_SAMPLES = [
    _chat("Your name is Lorina.", "Hello, my name is Lorina.", "Hello Lorina! How can I help you?", "What's my name?"),
    _chat("I am sorry, I do not know that.", "What is the capital of Atlantis?"),
    _chat("I am sorry, I do not know that.", "Who is the president?"),
    _chat("Once upon a time", "Tell me a story about a dragon."),
]
"""Shown beside the samples, because a reader should see failures too."""


def prompt_text(sample: Sample) -> str:
    """The prompt with its special tokens, up to where the model goes on."""
    if sample.text:
        return BOS + sample.text
    roles = ("user", "assistant")
    return render_chat((roles[i % 2], turn) for i, turn in enumerate(sample.turns)) + "<|assistant|>"


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
    }
    return {
        kind: f"{sum(answer(model, tokenizer, s, 20).startswith(s.expected) for s in samples)} of {len(samples)}"
        for kind, samples in probes.items()
    }


def _recall(name: str) -> Sample:
    return _chat(
        f"Your name is {name}.", f"Hi, my name is {name}.", f"Hello {name}! How can I help you?", "What is my name?"
    )

"""Offsets of tokens in the text of a completion."""

from __future__ import annotations

import pytest
from support.stub_node import make_model_folder

from common.control.messages import PromptLogprobs, TokenLogprobs
from router.http.openai.logprobs import TextLogprobs
from router.text.tokenizer import Tokenizer

FOUND = PromptLogprobs(-0.5, 1, [], [])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_model_folder(tmp_path_factory.mktemp("model") / "stub"))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("special", "echo", "offsets"),
    [
        (["<s>"], "xy", [0, 0, 1]),
        (["<s>", "<|user|>"], "<|user|>xy", [0, 0, 8, 9]),
        (["<s>", "<|user|>"], "<s><|user|>xy", [0, 3, 11, 12]),
        (["<s>", "<|user|>"], "xy", [0, 0, 0, 1]),
    ],
)
def test_special_tokens_of_an_echo_have_the_room_that_they_take_in_it(
    tokenizer: Tokenizer, skip: bool, special: list[str], echo: str, offsets: list[int]
) -> None:
    ids = [token_id for token in [*special, "x", "y"] if (token_id := tokenizer.token_id(token)) is not None]
    logprobs = TextLogprobs(tokenizer, skip_special_tokens=skip, tokens_as_ids=False)
    (portion,) = logprobs.render_prompt(ids, [FOUND] * (len(ids) - 1), echo)
    assert portion["text_offset"] == offsets
    end = tokenizer.token_id("</s>")
    assert end is not None
    answer = logprobs.render([end, ids[-1]], [TokenLogprobs(-0.5, [], [])] * 2)
    assert answer["text_offset"] == [len(echo), len(echo) + (0 if skip else len("</s>"))]


def test_a_token_behind_half_a_character_begins_behind_its_replacement(tokenizer: Tokenizer) -> None:
    (half, *_), (letter,) = (tokenizer.encode(text, add_special_tokens=False) for text in ("é", "x"))
    logprobs = TextLogprobs(tokenizer, skip_special_tokens=True, tokens_as_ids=False)
    shown = logprobs.render(
        [letter, half, letter, *tokenizer.encode("é", add_special_tokens=False), letter], [None] * 6
    )
    assert shown["text_offset"] == [0, 1, 2, 3, 3, 4]

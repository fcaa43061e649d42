from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay import BadRequest, SamplingParams
from kvrelay.offline.prompts import chat_jobs, generate_jobs
from router.models import served_model
from router.models.served_model import ServedModel


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return served_model.load("demo", None, served_model.LoadOptions())


def ids(model: ServedModel, prompts: Any) -> list[list[int]]:
    return [job.request.engine.prompt_ids.tolist() for job in generate_jobs(model, prompts, None)]


def test_every_form_of_a_prompt_is_taken(model: ServedModel) -> None:
    [[*text_ids]] = ids(model, "Hello")
    assert ids(model, ["Hello"]) == ids(model, {"prompt": "Hello"}) == [text_ids]
    assert ids(model, text_ids) == ids(model, [text_ids]) == ids(model, {"prompt_token_ids": text_ids}) == [text_ids]
    assert ids(model, [text_ids, "Hello", {"prompt": "Hello"}]) == [text_ids] * 3
    assert ids(model, []) == []
    assert ids(model, "") == [text_ids[:1]], "what the tokenizer adds"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"promt": "a"},
        {"prompt": "a", "x": 1},
        ["a", "b"],
        [10**6],
        [[1], [2]],
        None,
        {"prompt": None},
        5,
        [1, "a"],
        [True],
        b"a",
        "a\ud800",
        np.array([1.5]),
    ],
)
def test_a_wrong_prompt_is_named_by_its_index(model: ServedModel, wrong: Any) -> None:
    with pytest.raises(BadRequest, match="prompt 1: "):
        generate_jobs(model, ["fine", wrong], None)


@pytest.mark.parametrize("wrong", [None, 5, b"ab"])
def test_what_is_no_list_of_prompts_is_refused(model: ServedModel, wrong: Any) -> None:
    with pytest.raises(BadRequest, match="must be one text or one list of token ids"):
        generate_jobs(model, wrong, None)


def test_what_goes_wrong_in_the_callers_iterator_is_its_own_error(model: ServedModel) -> None:
    """A TypeError of it was said to be a wrong prompt."""

    def prompts() -> Iterator[str]:
        yield "a"
        raise TypeError("in the data")

    with pytest.raises(TypeError, match="in the data"):
        generate_jobs(model, prompts(), None)  # pyright: ignore[reportArgumentType]
    assert len(generate_jobs(model, iter(["a", "b"]), None)) == 2  # pyright: ignore[reportArgumentType]


def test_a_text_that_is_not_unicode_is_named_as_such(model: ServedModel) -> None:
    with pytest.raises(BadRequest, match=r"prompt 0: must be Unicode text: surrogates not allowed at index 1"):
        generate_jobs(model, "a\ud800", None)
    with pytest.raises(BadRequest, match=r"conversation 0: not a JSON value: .* surrogates not allowed"):
        chat_jobs(model, [{"role": "user", "content": "a\ud800"}], None, {})


def test_token_ids_may_come_from_numpy_and_torch(model: ServedModel) -> None:
    for array in (np.array([5, 6]), torch.tensor([5, 6]), list(np.array([5, 6])), list(torch.tensor([5, 6]))):
        assert ids(model, array) == ids(model, [array]) == ids(model, {"prompt_token_ids": array}) == [[5, 6]]
    assert (
        ids(model, np.array([[5, 6], [7, 8]])) == ids(model, list(torch.tensor([[5, 6], [7, 8]]))) == [[5, 6], [7, 8]]
    )
    assert ids(model, [torch.tensor([5]), torch.tensor([6])]) == [[5], [6]]


@pytest.mark.parametrize("wrong", [[SamplingParams(), None], [SamplingParams(), {"n": 1}]])
def test_wrong_parameters_are_named_by_their_index(model: ServedModel, wrong: Any) -> None:
    with pytest.raises(BadRequest, match="prompt 1: sampling_params must be SamplingParams, not"):
        generate_jobs(model, ["a", "b"], wrong)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "a", 5])
def test_what_is_no_parameters_is_refused(model: ServedModel, wrong: Any) -> None:
    with pytest.raises(BadRequest, match="sampling_params must be SamplingParams, not"):
        generate_jobs(model, "a", wrong)


def test_each_prompt_can_have_its_own_parameters(model: ServedModel) -> None:
    jobs = generate_jobs(model, ["a", "b"], [SamplingParams(seed=1), SamplingParams(seed=2)])
    assert [job.request.engine.sampling.seed for job in jobs] == [1, 2]
    with pytest.raises(BadRequest, match="1 sampling_params for 2 prompts"):
        generate_jobs(model, ["a", "b"], [SamplingParams()])


def test_conversations_are_rendered_by_the_models_template(model: ServedModel) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    [one] = chat_jobs(model, hello, None, {})
    first, second = chat_jobs(model, [hello, hello], None, {"add_generation_prompt": False})
    assert one.prompt is not None
    assert first.prompt == second.prompt
    assert one.prompt.startswith(first.prompt or "?")
    assert len(one.prompt) > len(first.prompt or "")
    assert one.request.engine.prompt_ids.tolist() == model.tokenizer.encode(one.prompt, add_special_tokens=False)


@pytest.mark.parametrize("wrong", [{"role": "user", "content": "x"}, "x", None, [[{"role": "user"}], 5], [5]])
def test_what_is_no_conversation_is_refused(model: ServedModel, wrong: Any) -> None:
    with pytest.raises(BadRequest):
        chat_jobs(model, wrong, None, {})


def test_a_wrong_conversation_is_named_by_its_index(model: ServedModel) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(BadRequest, match="conversation 1: "):
        chat_jobs(model, [hello, [{"role": "wizard", "content": "x"}]], None, {})


def test_what_no_grammar_enforces_of_a_schema_is_logged(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    generate_jobs(model, ["a", "b"], SamplingParams(structured_outputs={"json": schema}))
    assert [record.getMessage() for record in caplog.records if "held to" in record.getMessage()] == [
        "the answers are not held to uniqueItems of the schema"
    ]


def test_one_grammar_of_many_prompts_is_checked_once(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    async def check(source: str, param: str) -> None:
        checked.append(source)

    monkeypatch.setattr(model.grammars, "check", check)
    params = [SamplingParams(structured_outputs={"choice": [text]}) for text in ("a", "b", "a", "b")]
    assert len(generate_jobs(model, ["x"] * 4, params)) == 4
    assert len(checked) == 2


def test_several_threads_may_check_grammars(model: ServedModel) -> None:
    def made(number: int) -> int:
        params = [
            SamplingParams(structured_outputs={"regex": f"a{{{number},{number + each}}}"}) for each in range(1, 9)
        ]
        return len(generate_jobs(model, ["a"] * len(params), params))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(made, range(1, 17))) == [8] * 16


def test_a_grammar_that_cannot_be_used_is_named_before_anything_runs(model: ServedModel) -> None:
    wrong = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(BadRequest, match=r"prompt 1: structured_outputs\.regex"):
        generate_jobs(model, ["a", "b"], [SamplingParams(), wrong])

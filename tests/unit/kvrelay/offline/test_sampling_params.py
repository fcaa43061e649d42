from __future__ import annotations

from typing import Any

import pytest

from kvrelay import BadRequest, SamplingParams


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logprobs": 1025}, "logprobs"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"seed": object()}, None),
    ],
)
def test_a_wrong_value_is_refused_as_the_http_api_would(wrong: dict[str, Any], named: str | None) -> None:
    with pytest.raises(BadRequest) as refusal:
        SamplingParams(**wrong)
    assert refusal.value.param == named


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


def test_fields_left_out_are_left_to_the_models_defaults() -> None:
    fields = SamplingParams().completion_fields()
    assert fields["max_tokens"] == 16
    assert not fields.keys() & {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"}


def test_no_limit_of_tokens_is_said_explicitly() -> None:
    assert SamplingParams(max_tokens=None).completion_fields()["max_tokens"] is None


def test_chat_bodies_have_their_own_form_of_logprobs() -> None:
    params = SamplingParams(logprobs=3, logit_bias={7: -1.5})
    assert params.completion_fields()["logprobs"] == 3
    chat = params.chat_fields()
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)
    assert chat["logit_bias"] == {"7": -1.5}

"""`prediction`: what the answer will mostly be, for decode nodes that guess tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.base.errors import BadRequest
from common.control.identities import pack_ids
from router.http.openai.base_format import usage
from router.http.openai.build_request import Caller, chat_generation
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import completion_request
from router.models.served_model import LoadOptions, load
from router.requests.request import GenerationRequest

MODEL = load("demo", None, LoadOptions())
PARTS = [{"type": "text", "text": "def f():\n"}, {"type": "text", "text": "    return 1\n"}]


def asked(prediction: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "Rename f."}]
    body = completion_request({"messages": messages, "prediction": prediction}, ChatRequest)
    return chat_generation(body, MODEL, Caller()).request


@pytest.mark.parametrize("content", ["def f():\n    return 1\n", PARTS])
def test_its_tokens_go_to_the_nodes(content: Any) -> None:
    prediction = asked({"type": "content", "content": content}).engine.prediction.tolist()
    assert MODEL.tokenizer.decode(prediction) == "def f():\n    return 1\n"
    assert not asked(None).engine.prediction


def test_one_that_is_longer_than_any_answer_is_refused() -> None:
    with pytest.raises(BadRequest, match="prediction has more than"):
        asked({"type": "content", "content": "word " * 5000})


@pytest.mark.parametrize("wrong", [{"type": "image", "content": "x"}, {"type": "content"}, "text", {"content": [1]}])
def test_other_forms_are_refused(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="prediction"):
        asked(wrong)


def test_usage_tells_how_many_were_right_only_for_a_request_that_has_one() -> None:
    def counts(prediction: list[int]) -> Any:
        engine = SimpleNamespace(prompt_ids=[1, 2], prediction=pack_ids(prediction))
        generation = SimpleNamespace(
            request=SimpleNamespace(engine=engine),
            completion_tokens=5,
            cached_tokens=0,
            flow=SimpleNamespace(drafted=9, accepted=4),
        )
        return usage(cast("Any", [generation])).get("completion_tokens_details")

    assert counts([3]) == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 5}
    assert counts([]) is None

"""A model's `generation_config.json` as defaults of what clients leave out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.stub_node import make_model_folder

from common.base.errors import BadRequest, ConfigError
from common.config.router_options import GenerationConfig
from common.config.service_configs import RouterConfig
from common.control.messages import SamplingParams
from common.model.hub import DEMO_MODEL_PATH
from router.http.openai.build_request import Caller, _generation_request
from router.http.openai.chat_request import ChatRequest
from router.http.openai.completion_request import CompletionRequest
from router.http.openai.shared_fields import CompletionRequestBase
from router.models.catalog import ModelCatalog
from router.models.sampling_defaults import NEUTRAL, SamplingDefaults, read_sampling_defaults
from router.models.served_model import LoadOptions, ServedModel, load

QWEN25 = {
    "do_sample": True,
    "eos_token_id": [1],
    "pad_token_id": 1,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}


def write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model_folder(tmp_path_factory.mktemp("generation") / "model")
    return write(folder, {**QWEN25, "min_p": 0.1, "max_new_tokens": 30})


def served(folder: Path, generation_config: GenerationConfig = "auto") -> ServedModel:
    async def scene() -> ServedModel:
        catalog = ModelCatalog(RouterConfig(model=str(folder), generation_config=generation_config))
        await catalog.load_configured()
        return catalog.get(None)

    return asyncio.run(scene())


def asked(body: CompletionRequestBase, model: ServedModel, prompt_len: int = 5) -> SamplingParams:
    return _generation_request(body, model, [7] * prompt_len, "messages", Caller()).engine.sampling


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


def test_the_files_values_hold_where_a_client_says_nothing(folder: Path) -> None:
    model = served(folder)
    for body in (chat(), chat(temperature=None, top_p=None, top_k=None, max_tokens=None)):
        sampling = asked(body, model)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 20)
        assert (sampling.min_p, sampling.repetition_penalty, sampling.max_tokens) == (0.1, 1.05, 30)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)


def test_what_a_client_says_holds_even_if_it_is_neutral(folder: Path) -> None:
    model = served(folder)
    sampling = asked(chat(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=40), model)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.max_tokens) == (0.0, 1.0, 40)
    assert asked(chat(top_k=-1), model).top_k == 0
    assert 0 < asked(chat(top_p=0), model).top_p < 1 / 262_144, "less than what the most likely of so many tokens has"
    assert asked(chat(max_completion_tokens=50), model).max_tokens == 50


def test_a_seed_of_minus_one_is_a_new_one_for_each_request(folder: Path) -> None:
    model = served(folder)
    assert len({asked(chat(seed=seed), model).seed for seed in (-1, -1, None, None)}) == 4
    assert [asked(chat(seed=seed), model).seed for seed in (0, -2, 2**64 + 1)] == [0, 2**64 - 2, 1]


def test_the_default_length_never_makes_a_prompt_too_long(folder: Path) -> None:
    model = served(folder)
    assert asked(chat(), model, model.max_model_len - 3).max_tokens == 3
    assert asked(chat(max_tokens=None), model, model.max_model_len - 3).max_tokens == 3
    with pytest.raises(BadRequest, match="maximum context length"):
        asked(chat(max_tokens=4), model, model.max_model_len - 3)


def test_the_default_length_gives_way_to_the_least_that_a_client_asks_for(folder: Path) -> None:
    model = served(folder)
    assert asked(chat(min_tokens=29), model).max_tokens == 30
    assert asked(chat(min_tokens=31), model).max_tokens == 31
    with pytest.raises(BadRequest, match="min_tokens is 31, more than the limit of 30"):
        asked(chat(min_tokens=31, max_tokens=30), model)


def test_a_completion_keeps_openais_16_tokens(folder: Path) -> None:
    model = served(folder)
    sampling = asked(CompletionRequest(prompt=["hi"]), model)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (16, 0.7, 20)
    assert asked(CompletionRequest(prompt=["hi"], max_tokens=None), model).max_tokens == 30


def test_none_leaves_openais_defaults(folder: Path) -> None:
    model = served(folder, "none")
    assert model.sampling_defaults == NEUTRAL
    sampling = asked(chat(), model)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
    assert sampling.max_tokens == model.max_model_len - 5


def test_the_model_that_the_nodes_report_has_its_defaults_too(folder: Path) -> None:
    assert load(str(folder), "shown", LoadOptions(None, "auto")).sampling_defaults.temperature == 0.7
    assert load(str(folder), "shown", LoadOptions(None, "none")).sampling_defaults is NEUTRAL


def test_the_demo_model_sets_nothing() -> None:
    assert read_sampling_defaults(DEMO_MODEL_PATH) == NEUTRAL


def test_files_without_sampling_set_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NEUTRAL
    assert read_sampling_defaults(write(tmp_path, {"eos_token_id": 2, "do_sample": False})) == NEUTRAL
    assert read_sampling_defaults(write(tmp_path, {"temperature": None, "top_k": -1, "max_length": 20})) == NEUTRAL
    assert read_sampling_defaults(write(tmp_path, {"temperature": 0})) == SamplingDefaults(temperature=0.0)


def test_whole_floats_are_integers_and_an_empty_file_has_no_defaults(tmp_path: Path) -> None:
    found = read_sampling_defaults(write(tmp_path, {"top_k": 20.0, "max_new_tokens": 512.0}))
    assert (found.top_k, found.max_tokens) == (20, 512)
    (tmp_path / "generation_config.json").write_text("")
    assert read_sampling_defaults(tmp_path) == NEUTRAL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 20.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {key} must be .*--generation-config none"):
        read_sampling_defaults(write(tmp_path, {key: value}))

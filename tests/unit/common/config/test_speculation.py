"""`--speculate` and vLLM's `--speculative-config`."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig, UpConfig
from common.config.speculation import Speculation, parse_speculation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", None),
        ("auto", Speculation("suffix", 8)),
        ("suffix", Speculation("suffix", 8)),
        ("ngram", Speculation("ngram", 8)),
        ("draft:./small", Speculation("draft", 8, model="./small")),
        ("draft:org/name@v1:2", Speculation("draft", 8, model="org/name@v1:2")),
        ('{"model": "org/name", "num_speculative_tokens": 3}', Speculation("draft", 3, model="org/name")),
        ('{"method": "draft_model", "model": "./small"}', Speculation("draft", 8, model="./small")),
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', Speculation("ngram", 5)),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 24}', Speculation("suffix", 8)),
        ("mtp", Speculation("mtp", 8)),
        ("eagle:./head", Speculation("eagle3", 8, model="./head")),
        (
            '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3}',
            Speculation("eagle3", 3, model="org/head"),
        ),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 2}', Speculation("mtp", 2)),
    ],
)
def test_every_spelling_is_understood(text: str, expected: Speculation | None) -> None:
    assert parse_speculation(text, 8) == expected
    assert DecodeConfig(model="demo", speculate=text, speculate_tokens=8).speculation == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sufix", "none of suffix"),
        ("eagle:", "--speculate eagle:PATH needs the head's folder or name"),
        ('{"method": "eagle3"}', "needs the head's folder or name"),
        ('{"method": "eagle", "model": "x"}', "of the kind eagle are not supported"),
        ("mtp:./head", "none of suffix"),
        ('{"method": "mtp", "model": "x"}', "'model' is not supported"),
        ("draft", "needs the draft model's folder or name"),
        ("draft:", "needs the draft model's folder or name"),
        ('{"model": 3}', "needs the draft model's folder or name"),
        ('{"method": "draft_model"}', "needs the draft model's folder or name"),
        ('{"method": ["ngram"]}', "none of ngram, suffix, draft_model, mtp and eagle3"),
        ("{", "not valid JSON"),
        ('{"method": "medusa"}', "not supported"),
        ('{"method": "fast"}', "'fast' is none of ngram, suffix"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "a number from 1 to 128"),
        ('{"method": "ngram", "num_speculative_tokens": 1000}', "a number from 1 to 128"),
        ('{"method": "ngram", "model": "x"}', "'model' is not supported"),
        ('{"method": "ngram", "draft_tensor_parallel_size": 1}', "'draft_tensor_parallel_size' is not supported"),
    ],
)
@pytest.mark.parametrize("config", [DecodeConfig, UpConfig])
def test_what_is_wrong_is_named(text: str, message: str, config: type[DecodeConfig | UpConfig]) -> None:
    with pytest.raises(ConfigError, match=message):
        config(model="demo", speculate=text)


@pytest.mark.parametrize("config", [DecodeConfig, UpConfig])
@pytest.mark.parametrize("method", ["off", "draft:./small", '{"model": "./small"}'])
def test_recent_answers_without_a_method_that_searches_them_are_refused(
    method: str, config: type[DecodeConfig | UpConfig]
) -> None:
    with pytest.raises(ConfigError, match=r"^--speculate-answers needs --speculate suffix or ngram"):
        config(model="demo", speculate=method, speculate_answers=1000)
    searched = config(model="demo", speculate="suffix", speculate_answers=1000).speculation
    assert searched is not None
    assert searched.max_answer_tokens == 1000

"""Options whose value is a list."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.config.fields import listed
from common.config.service_configs import RouterConfig


@pytest.mark.parametrize("text", ["a,b/c", " a , b/c ", '["a", "b/c"]'])
def test_a_list_is_separated_by_commas_or_json(text: str) -> None:
    assert listed("x", text) == ["a", "b/c"]


def test_no_value_is_an_empty_list() -> None:
    assert listed("x", None) == listed("x", " ") == []


@pytest.mark.parametrize("text", ["a,,b", ",", "[1]", '["a"', '[""]'])
def test_an_empty_value_or_other_json_is_refused_with_the_configuration(text: str) -> None:
    with pytest.raises(ConfigError, match="served_model_name"):
        RouterConfig(served_model_name=text)

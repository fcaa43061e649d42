"""Finding a model's directory."""

from __future__ import annotations

import pytest

from common.base.errors import ConfigError
from common.model.hub import resolve_model


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing-of-that-name", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(name)

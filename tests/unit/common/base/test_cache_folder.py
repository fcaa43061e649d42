from __future__ import annotations

from pathlib import Path

import pytest

from common.base.cache_folder import cache_folder
from common.base.errors import ConfigError


def test_the_variable_is_preferred_to_the_users_cache_folder() -> None:
    assert cache_folder({"KVRELAY_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert cache_folder({"KVRELAY_CACHE": "", "XDG_CACHE_HOME": "/c"}) == Path("/c/kvrelay")


@pytest.mark.parametrize("xdg", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}])
def test_without_a_usable_variable_it_is_below_the_home_folder(
    xdg: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ana")
    assert cache_folder(xdg) == Path("/home/ana/.cache/kvrelay")


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="KVRELAY_CACHE=here is not an absolute path"):
        cache_folder({"KVRELAY_CACHE": "here"})

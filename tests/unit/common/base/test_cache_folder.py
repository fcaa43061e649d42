from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from common.base import cache_folder as module
from common.base.cache_folder import cache_folder, readable_folders, writable_folder
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


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_can_be_written_is_where_it_always_was(tmp_path: Path, temporary: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "c")}
    assert writable_folder("native", environ) == tmp_path / "c/kvrelay/native"
    assert readable_folders("native", environ) == [tmp_path / "c/kvrelay/native"]


@pytest.mark.parametrize("home", ["none", "a file"])
def test_without_a_home_that_can_be_written_it_is_among_the_temporary_files(
    home: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a random user id in a container: no entry in passwd, HOME unset, or / with no right to write there."""
    if home == "none":
        monkeypatch.setattr(module.Path, "home", no_home)
    else:
        (tmp_path / "home").write_text("")
        monkeypatch.setattr(module.Path, "home", lambda: tmp_path / "home")
    found = writable_folder("native", {})
    assert found == temporary / f"kvrelay-{os.getuid()}" / "native"
    assert found.is_dir()
    assert (found.parent.stat().st_mode & 0o777) == 0o700
    assert found in readable_folders("native", {})
    assert writable_folder("native", {}) == found


def test_a_temporary_folder_that_others_can_write_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They could put libraries there, which are loaded."""
    monkeypatch.setattr(module.Path, "home", no_home)
    spare = temporary / f"kvrelay-{os.getuid()}"
    spare.mkdir()
    spare.chmod(0o777)
    with pytest.raises(ConfigError, match=r"is not a folder of this user alone\); KVRELAY_CACHE can name a folder"):
        writable_folder("native", {})
    with pytest.raises(ConfigError):
        readable_folders("native", {})


def test_the_folder_that_the_variable_names_is_never_replaced(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KVRELAY_CACHE must name a folder that can be written"):
        writable_folder("native", {"KVRELAY_CACHE": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="KVRELAY_CACHE must name"):
        writable_folder("native", {"KVRELAY_CACHE": "relative"})

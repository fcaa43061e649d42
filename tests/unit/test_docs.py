"""The documents: every file, command and option that they name exists, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.paths import ROOT

from common.base.errors import ConfigError, KvRelayError, RestartRequested
from common.base.variables import CACHE, CPU_KERNELS
from common.cli import app
from common.config.fields import field_infos
from common.config.service_configs import SERVICES
from common.config.sources import ADMIN_URL_VARIABLE, CONFIG_FILE_VARIABLE, ENV_PREFIX
from router.http.openapi import ERRORS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PATH = re.compile(
    r"`((?:router|prefill_node|decode_node|kvtransfer|common|tests|scripts|compose|docs)/[\w./-]*)(?:::\w+)?`"
)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_TEST_FILE = re.compile(r"`(test_\w+\.py)`")
_COMMAND = re.compile(r"(?<![\w./'\[-])kvrelay (\w[^`|#\n]*)")
_MADE_BY_USERS = "compose/.env"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    missing = [path for path in _PATH.findall(text) if path != _MADE_BY_USERS and not (ROOT / path).exists()]
    missing += [name for name in _TEST_FILE.findall(text) if not list((ROOT / "tests").rglob(name))]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def _unknown_options(line: str) -> list[str]:
    """What the command that begins with these words does not take. Words that are no command, as in prose, take anything."""
    words = line.split()
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "get_command") and (found := command.get_command(None, words[0])) is not None:
        command = found
        del words[0]
    if hasattr(command, "get_command"):
        return []
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_variables_that_exist(page: Path) -> None:
    options = {ENV_PREFIX + name.upper() for service in SERVICES for name in field_infos(service)}
    others = {ADMIN_URL_VARIABLE, CONFIG_FILE_VARIABLE, CACHE, CPU_KERNELS, "KVRELAY_PREBUILT"}
    assert not set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", page.read_text("utf-8"))) - options - others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_have_their_options(page: Path) -> None:
    shown = _COMMAND.findall(page.read_text("utf-8"))
    assert not {line: unknown for line in shown if (unknown := _unknown_options(line))}


def test_the_options_of_shown_commands_are_looked_up() -> None:
    assert _unknown_options("admin lora load NAME FOLDER --node x --nod y") == ["--nod"]
    assert _unknown_options("up --model ./llama --prefil 2") == ["--prefil"]


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("package", ["router", "kvtransfer", "common"])
def test_architecture_lists_every_folder_of_a_package(package: str) -> None:
    (row,) = re.findall(rf"^    {package}/ +(.*)$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M)
    folders = {path.relative_to(ROOT / package).parts[0] for path in (ROOT / package).glob("*/**/*.py")}
    assert set(re.findall(r"(\w+)/", row)) == folders


def _codes(error: type[KvRelayError]) -> set[str]:
    return {error.code}.union(*map(_codes, error.__subclasses__()))


def test_every_status_and_code_that_clients_may_get_is_documented() -> None:
    given = {code for file in (ROOT / "router").rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())}
    codes = given | _codes(KvRelayError) - {ConfigError.code, RestartRequested.code}
    section = (ROOT / "docs/api.md").read_text("utf-8").partition("## Errors")[2].partition("\n## ")[0]
    assert not codes - set(re.findall(r"`(\w+)`", section))
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", section, re.M)
    assert [int(status) for row in rows for status in row.split(", ")] == sorted(ERRORS)

"""The documents: every file, command and option that they name exists, links lead somewhere, and lists are complete."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.paths import ROOT

from common.base.errors import ConfigError, InvalidTransition, KvRelayError, RestartRequested
from common.base.variables import CACHE, CPU_KERNELS, STRICT_STATES
from common.config.fields import field_infos
from common.config.service_configs import SERVICES, RouterConfig
from common.config.sources import ADMIN_URL_VARIABLE, CONFIG_FILE_VARIABLE, ENV_PREFIX
from kvrelay.command import app
from router.http.openapi import ERRORS
from router.router import Router

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PATH = re.compile(
    r"`((?:router|prefill_node|decode_node|kvtransfer|common|tests|scripts|compose|docs)/[\w./-]*)(?:::\w+)?`"
)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_TEST_FILE = re.compile(r"`(test_\w+\.py)`")
_COMMAND = re.compile(r"(?<![\w./'\[-])kvrelay (\w[^`|#\n]*)")
_CODE = re.compile(r"```\w*\n(.*?)```|`([^`\n]+)`", re.S)
_SHOWN_COMMAND = re.compile(r"^ *(?:\w+=\S+ +)*kvrelay +([a-z].*)", re.M)
_MADE_BY_USERS = "compose/.env"
_ANSWER = "is running"
"""What follows the name in an answer of the router."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    missing = [path for path in _PATH.findall(text) if path != _MADE_BY_USERS and not (ROOT / path).exists()]
    missing += [name for name in _TEST_FILE.findall(text) if not list((ROOT / "tests").rglob(name))]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def _command(line: str) -> tuple[Any, list[str]]:
    """The command, or group of commands, that begins with these words, and the words behind it."""
    words = line.split()
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "get_command") and (found := command.get_command(None, words[0])) is not None:
        command = found
        del words[0]
    return command, words


def _unknown_options(line: str) -> list[str]:
    """What the command that begins with these words does not take. Words that are no command, as in prose, take anything."""
    command, words = _command(line)
    if hasattr(command, "get_command"):
        return []
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_variables_that_exist(page: Path) -> None:
    options = {ENV_PREFIX + name.upper() for service in SERVICES for name in field_infos(service)}
    others = {ADMIN_URL_VARIABLE, CONFIG_FILE_VARIABLE, CACHE, CPU_KERNELS, STRICT_STATES, "KVRELAY_PREBUILT"}
    assert not set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", page.read_text("utf-8"))) - options - others


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_have_their_options(page: Path) -> None:
    shown = _COMMAND.findall(page.read_text("utf-8"))
    assert not {line: unknown for line in shown if (unknown := _unknown_options(line))}


def _unknown_commands(text: str) -> list[str]:
    shown = [line for code in _CODE.findall(text) for line in _SHOWN_COMMAND.findall("\n".join(code))]
    found = [(line, *_command(line)) for line in shown if line != _ANSWER]
    return [line for line, command, rest in found if hasattr(command, "get_command") and rest[:1] and rest[0][0] != "-"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_a_page_s_code_exist(page: Path) -> None:
    assert not _unknown_commands(page.read_text("utf-8"))


def test_commands_in_code_are_looked_up() -> None:
    text = "`kvrelay admin chek`, kvrelay does, `kvrelay` `kvrelay admin --url x`\n```bash\nA=1 kvrelay serv --x\n```"
    assert _unknown_commands(text) == ["admin chek", "serv --x"]


def test_the_options_of_shown_commands_are_looked_up() -> None:
    assert _unknown_options("admin lora load NAME FOLDER --node x --nod y") == ["--nod"]
    assert _unknown_options("up --model ./llama --prefil 2") == ["--prefil"]


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("package", ["kvrelay", "router", "kvtransfer", "common"])
def test_architecture_lists_every_folder_of_a_package(package: str) -> None:
    (row,) = re.findall(rf"^    {package}/ +(.*)$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.M)
    folders = {path.relative_to(ROOT / package).parts[0] for path in (ROOT / package).glob("*/**/*.py")}
    assert set(re.findall(r"(\w+)/", row)) == folders


def _codes(error: type[KvRelayError]) -> set[str]:
    services = [each for each in error.__subclasses__() if each.__module__ == error.__module__]  # not those of commands
    return {error.code}.union(*map(_codes, services))


def test_every_status_and_code_that_clients_may_get_is_documented() -> None:
    given = {code for file in (ROOT / "router").rglob("*.py") for code in re.findall(r'code="(\w+)"', file.read_text())}
    codes = given | _codes(KvRelayError) - {ConfigError.code, RestartRequested.code, InvalidTransition.code}
    section = (ROOT / "docs/api.md").read_text("utf-8").partition("## Errors")[2].partition("\n## ")[0]
    assert not codes - set(re.findall(r"`(\w+)`", section))
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", section, re.M)
    assert [int(status) for row in rows for status in row.split(", ")] == sorted(ERRORS)


def test_all_metrics_are_documented_with_their_types() -> None:
    async def exported() -> dict[str, str]:
        router = Router(RouterConfig())
        subscriber = router.subscribe("redis://127.0.0.1:1/0", "test")
        families = list(router.metrics.registry.collect())
        router.close()
        await subscriber._client.aclose()
        return {f"{each.name}{'_total' * (each.type == 'counter')}": each.type for each in families}

    section = (ROOT / "docs/monitoring.md").read_text("utf-8").partition("## All metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \|", section, re.M)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == asyncio.run(exported())

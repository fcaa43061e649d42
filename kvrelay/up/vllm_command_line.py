"""vLLM's command line as ours: the words of `kvrelay serve`, translated by the table of `vllm_options`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.base.errors import ConfigError
from common.base.sentences import counted
from common.config.cli import Translated
from kvrelay.up.vllm_options import OPTIONS, SHORT, Arity, VllmOption

_BOOLEANS = ("true", "false", "none", "1", "0", "yes", "no")
_YAML = (".yaml", ".yml")


@dataclass
class _Translation:
    words: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    model: list[str] = field(default_factory=list[str])
    """The words without a flag; there may be one."""
    revision: str = ""


def translate(args: Sequence[str], switches: set[str], lists: set[str]) -> Translated:
    """Our words for those of vLLM, and what to tell of options without an effect. `switches`, `lists`: our own flags without a
    value, and with several.

    Raises: ConfigError that names everything that has to be given in another way.
    """
    found, rest = _Translation(), list(args)
    while rest:
        word = rest.pop(0)
        if word == "--" or not re.match(r"-+[A-Za-z]", word):
            found.model += rest if word == "--" else [word]
            rest = [] if word == "--" else rest
            continue
        name, value = _named(word)
        option = _option(name)
        if option is None:
            flag = "--" + name if word.startswith("--") else word.partition("=")[0]
            values = _own_values(flag, value, rest, switches, lists)
            found.words += [flag if value is None else f"{flag}={value}", *values]
            if flag == "--config" and (value or "".join(values)).endswith(_YAML):
                found.problems.append("--config: the file is TOML, with the options of kvrelay up")
            continue
        _apply(found, option, name, _following(option.arity, rest) if value is None else [value])
    if found.problems:
        what = counted(len(found.problems), "option of vLLM is/options of vLLM are")
        raise ConfigError(f"{what} not taken: " + "; ".join(found.problems))
    if found.revision and found.model:
        found.model[0] += f"@{found.revision}"
    elif found.revision:
        raise ConfigError("--revision needs a model before it: kvrelay serve ORG/NAME --revision REVISION")
    return Translated([*found.words, *found.model], found.notes)


def _named(word: str) -> tuple[str, str | None]:
    """The option's name with dashes, and its value if both are one word: `--x=1`, `-O3`, `--compilation-config.mode 3`."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--"):
        glued = re.fullmatch(r"(-O)(\d)", flag)
        return (SHORT[glued[1]], glued[2]) if glued else (SHORT.get(flag, flag), value if equals else None)
    name = flag[2:].replace("_", "-").split(".")[0].rstrip("+")
    return name, value if equals else None


def _option(name: str) -> VllmOption | None:
    """The entry of the table; None for an option that means the same here or is unknown."""
    option = OPTIONS.get(name)
    if option is None and name.startswith("no-"):
        option = OPTIONS.get(name[3:])
        option = option if option is not None and option.arity == "switch" else None
    return None if option is None or option.does == "same" else option


def _own_values(flag: str, value: str | None, rest: list[str], switches: set[str], lists: set[str]) -> list[str]:
    """Take the words that belong to one of our flags."""
    if value is not None or not flag.startswith("--") or flag == "--help":
        return []
    is_switch = flag in switches or (flag.startswith("--no-") and "--" + flag[5:] in switches)
    return _following("switch" if is_switch else "values" if flag in lists else "value", rest)


def _following(arity: Arity, rest: list[str]) -> list[str]:
    """Take the words that belong to an option; `values`: all up to the next one."""
    if arity == "values":
        count = next((at for at, word in enumerate(rest) if word.startswith("-")), len(rest))
    else:
        count = int(bool(rest) and (arity == "value" or rest[0].lower() in _BOOLEANS))
    taken, rest[:count] = rest[:count], []
    return taken


def _apply(found: _Translation, option: VllmOption, name: str, values: list[str]) -> None:
    shown = "--" + name
    if option.arity != "switch" and not values:
        found.problems.append(f"{shown} needs a value")
        return
    match option.does:
        case "ignored":
            found.notes.append(f"{shown} of vLLM has no effect: {option.says}")
        case "refused":
            is_off = name not in OPTIONS or (
                option.arity == "switch" and values[:1] and values[0].lower() in ("false", "0")
            )
            if not is_off and not (values and values[0] in option.neutral):
                found.problems.append(f"{shown}: {option.says}")
        case _ if name == "revision":
            found.revision = values[0]
        case _ if name == "model":
            found.model += values
        case _:
            try:
                found.words += option.convert(values)
            except ValueError as error:
                found.problems.append(f"{shown}: {error}")

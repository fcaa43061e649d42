"""Special tokens by name, and tokens that a model's files add to tokenizer.json, as transformers reads them. No torch: at the
start of a router, and where a node first needs a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from common.base.errors import ConfigError
from common.model.config_file import as_list, as_object, read_json_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTED = "added_tokens_decoder"
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""The files beside tokenizer.json that name special and added tokens."""


def read_if_there(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file. Raises: ConfigError."""
    return read_json_object(path) if path.is_file() else {}


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each may be written as a string or as an object with its content. `config`: the content of
    tokenizer_config.json; special_tokens_map.json goes first where that is of the older kind, without a list of added tokens."""
    merged = _merged(folder, config)
    return {name: text for name in _SPECIAL_NAMES if (text := _text(merged.get(name))) is not None}


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that chat templates see: `special_tokens`, and those under names of the model's own (`image_token`)."""
    merged = _merged(folder, config)
    tokens = {name: value for name, value in merged.items() if name.endswith("_token")}
    found = as_object(merged.get("extra_special_tokens")) | tokens
    return {name: text for name, value in found.items() if (text := _text(value)) is not None}


def _merged(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    mapped = read_if_there(folder / "special_tokens_map.json")
    return {**mapped, **config} if _LISTED in config else {**config, **mapped}


def _text(value: object) -> str | None:
    text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _all_special(merged: Mapping[str, Any]) -> list[AddedToken]:
    """The special tokens with a key of their own (`bos_token`, ...), and the listed ones."""
    found: list[object] = [value for key, value in merged.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = merged.get(key)
        found += (*as_object(value).values(), *as_list(value))
    return [_added(text, value, special=True) for value in found if (text := _text(value)) is not None]


def _added(text: str, value: object, **more: bool) -> AddedToken:
    """`value`: perhaps an object with the token's flags."""
    entry = as_object(value)
    return AddedToken(text, **{**{flag: entry[flag] for flag in _FLAGS if flag in entry}, **more})


def complete_from(folder: Path, tokenizer: Tokenizer) -> None:
    """`complete` with what the files of `folder` say. Raises: ConfigError."""
    config = read_if_there(folder / FILES[0])
    complete(tokenizer, folder, config, special_tokens(folder, config))


def complete(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json or added_tokens.json lists, if tokenizer.json does not have them, or has them
    with other flags.
    `special`: of `special_tokens`; those that are in the vocabulary become special tokens, as do those of other lists that are in
    no list of added tokens.

    Raises: ConfigError for a broken list, or one that gives a token an impossible id.
    """
    is_listed = _LISTED in config
    file = folder / ("tokenizer_config.json" if is_listed else "added_tokens.json")
    known = _known(tokenizer)
    try:
        listed = _listed(config[_LISTED]) if is_listed else _legacy(read_if_there(file), {*special.values()}, known)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} does not list added tokens by their ids") from error
    for token_id, token in sorted(listed.items()):
        is_new = tokenizer.token_to_id(token.content) is None
        if repr(known.get(token.content)) != repr(token):
            _add(tokenizer, token)
        if is_new and tokenizer.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"{file} gives the token {token.content!r} the id {token_id}, which cannot follow those of tokenizer.json; "
                "save the tokenizer again with transformers"
            )
    known = _known(tokenizer)
    for token in _all_special(config if is_listed else _merged(folder, config)):
        own = known.setdefault(token.content, token)
        if own is token and tokenizer.token_to_id(token.content) is not None:
            _add(tokenizer, token)
        elif not own.special and token.content in special.values():
            own.special = True
            _add(tokenizer, own)


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    cast("Any", tokenizer).add_tokens([token])


def _known(tokenizer: Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}


def _listed(entries: Mapping[str, Mapping[str, Any]]) -> dict[int, AddedToken]:
    return {int(token_id): _added(entry["content"], entry) for token_id, entry in entries.items()}


def _legacy(ids: Mapping[str, int], special: set[str], known: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    """The tokens that added_tokens.json adds to the `known` ones."""
    return {
        int(token_id): AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in ids.items()
        if text not in known
    }

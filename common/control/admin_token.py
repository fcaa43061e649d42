"""What an admin token may look like. Pure."""

from __future__ import annotations

from common.base.errors import ConfigError


def check_token(token: str) -> None:
    """Refuse a token that no HTTP header can carry as it is; the usual one ends with the line end of a secret's file.

    Raises: ConfigError, which does not quote it.
    """
    if not token.isprintable() or token != token.strip():
        raise ConfigError("the admin token has a line end or another control character, or a space at an end of it")

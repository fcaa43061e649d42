"""Validation of admin tokens. Pure."""

from __future__ import annotations

from common.base.errors import ConfigError


def check_token(token: str) -> None:
    """Refuse a token that is not valid in an HTTP header, such as one read from a file with its line end.

    Raises: ConfigError, which does not quote the token.
    """
    if not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the admin token contains a line end or another control character, or begins or ends with a space"
        )

"""Errors as users read them."""

from __future__ import annotations

from common.base.errors import ConfigError


def test_message_is_one_line_whatever_a_broken_file_put_into_it() -> None:
    error = ConfigError("cannot load tokenizer.json: unknown version 'a\r\n\nb'")
    assert error.message == str(error) == "cannot load tokenizer.json: unknown version 'a  b'"

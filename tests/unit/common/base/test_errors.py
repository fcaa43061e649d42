"""Errors as users read them."""

from __future__ import annotations

from common.base.errors import ConfigError, Overloaded


def test_message_is_one_line_whatever_a_broken_file_put_into_it() -> None:
    error = ConfigError("cannot load tokenizer.json: unknown version 'a\r\n\nb'")
    assert error.message == str(error) == "cannot load tokenizer.json: unknown version 'a  b'"


def test_an_error_that_tells_its_attempts_keeps_everything_else() -> None:
    error = Overloaded("full", retry_after_s=7.0)
    told = error.after_attempts(3)
    assert isinstance(told, Overloaded)
    assert (told.message, told.retry_after_s) == ("full (after 3 attempts)", 7.0)
    assert error.message == "full"
    assert error.after_attempts(1) is error

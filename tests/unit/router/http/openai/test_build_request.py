"""Whose share a request counts against, and how urgent it may be."""

from __future__ import annotations

import pytest

from router.http.client import Client
from router.http.openai.build_request import Caller, caller_of
from router.requests.queued_request import Tenant
from router.requests.request import TraceContext


def test_without_keys_the_tenant_is_the_clients_address_whatever_user_says() -> None:
    scope = {"type": "http", "headers": [(b"authorization", b"Bearer anything")], "client": ("10.0.0.7", 5)}
    assert caller_of(scope, "me", None) == Caller(Tenant("10.0.0.7", "me"), "me", 0)
    assert caller_of({"type": "http", "headers": [], "client": None}, None, None) == Caller(Tenant("", ""), "", 0)


def test_clients_cannot_raise_their_priority_above_their_class() -> None:
    scope = {"type": "http", "headers": [], "kvrelay.client": Client("team", -5)}
    assert [caller_of(scope, None, asked).priority for asked in (-100, -5, 3, None)] == [-5, -5, 3, 0]
    anyone = {"type": "http", "headers": [(b"x-session-id", b"s")]}
    assert [caller_of(anyone, "u", asked) for asked in (-1, 7)] == [Caller(Tenant("", "u"), "s", n) for n in (0, 7)]


@pytest.mark.parametrize(
    ("parent", "state", "kept"),
    [
        ("p" * 55, "s" * 512, TraceContext("p" * 55, "s" * 512)),
        ("p" * 55, "s" * 513, TraceContext("p" * 55)),
        ("p" * 56, "s", None),
        ("", "s", None),
    ],
)
def test_trace_headers_longer_than_the_standards_are_ignored(
    parent: str, state: str, kept: TraceContext | None
) -> None:
    scope = {"type": "http", "headers": [(b"traceparent", parent.encode()), (b"tracestate", state.encode())]}
    assert caller_of(scope, None, None).trace == kept

"""Which tenant a request counts for."""

from __future__ import annotations

from router.http.openai.build_request import caller_of
from router.http.openai.completion_request import CompletionRequest


def tenant(authorization: str, user: str | None = None, *, with_keys: bool = True) -> str:
    scope = {"type": "http", "headers": [(b"authorization", authorization.encode())]}
    return caller_of(scope, CompletionRequest(model="m", prompt=["a"], user=user), with_keys=with_keys).tenant


def test_a_key_is_one_tenant_however_its_header_is_spelled() -> None:
    spellings = ["Bearer key", "bearer key", "bEARER  key", "BEARER \t key "]
    assert len({tenant(spelling) for spelling in spellings}) == 1
    assert tenant("Bearer key") != tenant("Bearer other")
    assert "key" not in tenant("Bearer key")


def test_without_keys_the_user_is_the_tenant() -> None:
    assert tenant("Bearer key", "me", with_keys=False) == "me"

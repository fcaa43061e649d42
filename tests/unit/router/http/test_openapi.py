"""`/openapi.json`: that it resolves, names everything once and describes every status."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import pytest
from fastapi import FastAPI

from common.config.service_configs import RouterConfig
from common.control.http_server import ConnectionLimit
from router.http.direct_endpoints import DirectEndpoints
from router.http.hosts import HostGuard
from router.http.server import http_server
from router.router import Router


async def _document(api_key: str) -> dict[str, Any]:
    config = RouterConfig(api_key=api_key)
    router = Router(config)
    try:
        limited = cast("ConnectionLimit", http_server(router, config, None).config.app)
        hosts = cast("HostGuard", limited._app)
        direct = cast("DirectEndpoints", hosts._app)
        return cast("FastAPI", direct._app).openapi()
    finally:
        router.close()


@pytest.fixture(scope="module", params=["", "key"], ids=["without_keys", "with_keys"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return asyncio.run(_document(request.param))


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)))
    assert references
    schemas = document["components"]["schemas"]
    assert references <= {f"#/components/schemas/{name}" for name in schemas}


def test_every_call_has_an_own_id_a_description_and_described_answers(document: dict[str, Any]) -> None:
    calls = [call for methods in document["paths"].values() for call in methods.values()]
    ids = [call["operationId"] for call in calls]
    assert len(ids) == len(set(ids))
    for call in calls:
        assert call["description"]
        assert "200" in call["responses"]
        assert all(answer["description"] for answer in call["responses"].values())
        if "requestBody" in call:
            assert {"400", "404", "413", "415", "499"} <= call["responses"].keys()


def test_a_key_is_asked_for_where_one_is_needed(document: dict[str, Any]) -> None:
    paths = document["paths"]
    with_keys = "security" in paths["/v1/models"]["get"]
    for path, methods in paths.items():
        for call in methods.values():
            needed = with_keys and path not in ("/health", "/ready", "/ping")
            assert ("security" in call) == ("401" in call["responses"]) == needed


def test_a_field_with_several_forms_says_so(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert [form.get("type") for form in schemas["CompletionRequest"]["properties"]["stop"]["anyOf"]] == [
        "string",
        "array",
        "null",
    ]
    answer = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    assert answer["content"].keys() == {"application/json", "text/event-stream"}

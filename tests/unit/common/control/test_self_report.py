"""What a service says of itself at its admin port."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from typing import Any

import pytest

from common.base.errors import BadRequest, Overloaded
from common.config.service_configs import DecodeConfig, RouterConfig
from common.control import self_report
from common.control.admin_server import Call
from common.control.self_report import SelfReport, process_facts, public_options


def call(**body: Any) -> Call:
    return Call({}, {}, body)


def handler(report: SelfReport, path: str) -> Any:
    return next(route.handler for route in report.routes() if route.path == path)


def test_options_show_of_secrets_only_whether_they_are_set() -> None:
    config = RouterConfig(
        redis_url="redis://:hidden@host/0",
        api_key="hidden",
        otlp_traces_endpoint="http://user:hidden@host:4318/v1/traces?key=hidden",
    )
    options = public_options(config)
    assert "hidden" not in json.dumps(options)
    assert (options["api_key"], options["admin_token"], options["port"]) == ("set", "", 8000)
    assert options["otlp_traces_endpoint"] == "http://host:4318/v1/traces"


def test_a_service_reports_the_version_that_it_runs_also_after_an_upgrade_of_the_installed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that `kvrelay admin check` says what has not been restarted yet."""
    monkeypatch.setattr(self_report, "version", lambda package: "1.0")
    report = SelfReport(public_options(RouterConfig()), None)
    monkeypatch.setattr(self_report, "version", lambda package: "2.0")
    assert asyncio.run(handler(report, "/facts")(call()))["versions"]["kvrelay"] == "1.0"


def test_facts_name_the_addresses_that_cannot_be_reached() -> None:
    report = SelfReport(public_options(DecodeConfig()), None, devices=lambda: {"gpus": []})
    with socket.create_server(("127.0.0.1", 0)) as open_port, socket.create_server(("127.0.0.1", 0)) as closed:
        good, bad = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (open_port, closed))
        closed.close()
        facts = asyncio.run(handler(report, "/facts")(call(dial=[good, bad, "tcp://no port"])))
    assert set(facts["unreachable"]) == {bad, "tcp://no port"}
    assert facts["gpus"] == []
    assert facts["versions"]["python"]
    with pytest.raises(BadRequest):
        asyncio.run(handler(report, "/facts")(call(dial="x")))


def test_facts_are_plain_data_of_this_process() -> None:
    facts = json.loads(json.dumps(process_facts()))
    assert 0 < facts["open_files"] < facts["max_files"]
    assert facts["shm_total_bytes"] >= facts["shm_free_bytes"]


def test_a_profile_is_compressed_and_only_one_is_recorded_at_a_time() -> None:
    report = SelfReport(public_options(RouterConfig()), None)
    record = handler(report, "/profile")

    async def scene() -> bytes:
        first = asyncio.create_task(record(call(seconds=0.02)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await record(call())
        return await first

    assert json.loads(gzip.decompress(asyncio.run(scene())))["traceEvents"]
    with pytest.raises(BadRequest, match="at most 60"):
        asyncio.run(record(call(seconds=3600)))

"""`kvrelay up --on ray` on a real Ray cluster of several raylets: what dies is placed again, and streams do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import psutil
import pytest
from support.ray_hosts import RayHosts, UpOnRay, ray_hosts, services
from support.redis_server import RedisServer
from support.system import wait_until
from typer.testing import CliRunner

from kvrelay.admin.cli import app as admin

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

STREAMS = 16
_TOKENS = 500


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Tests here start hosts, and the reconciler again, for those after them: `hosts` and `system` check what is left at the
    end."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    with ray_hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def system(hosts: RayHosts, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpOnRay]:
    up = UpOnRay(hosts, redis, tmp_path_factory.mktemp("ray"), "--prefill", "2", "--decode", "2")
    up.start()
    up.wait_usable(2, 2)
    yield up
    assert up.stop() == 0, up.log()
    wait_until(lambda: not services(), 10, "nothing is left over")


async def _stream(client: openai.AsyncOpenAI, number: int) -> str:
    stream = await client.completions.create(
        model="demo",
        prompt=f"{number}: Tell me a long story about the sea, a ship and its captain. " * 3,
        max_tokens=_TOKENS,
        temperature=0.0 if number % 2 else 0.8,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def _crowd(url: str, strike: Callable[[], None] | None) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        tasks = [asyncio.create_task(_stream(client, number)) for number in range(STREAMS)]
        if strike is not None:
            await asyncio.sleep(0.7)
            assert not any(task.done() for task in tasks), "the strike comes too late"
            await asyncio.to_thread(strike)
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def expected(system: UpOnRay) -> list[str]:
    return asyncio.run(_crowd(system.url, None))


def _host_of(hosts: RayHosts, process: psutil.Process) -> str:
    actor = process.parent()
    assert actor is not None
    return hosts.raylet_pids()[actor.ppid()]


def _kill_actor(hosts: RayHosts, service: psutil.Process) -> None:
    actor = service.parent()
    assert actor is not None
    actor.kill()


def _kill_host(hosts: RayHosts, service: psutil.Process) -> None:
    hosts.kill(_host_of(hosts, service))


@pytest.mark.parametrize(
    ("kill", "name"),
    [
        (_kill_actor, "prefill-0"),
        (_kill_actor, "decode-0"),
        (_kill_host, "prefill-1"),
        (_kill_host, "decode-1"),
    ],
    ids=["actor of a prefill node", "actor of a decode node", "host of a prefill node", "host of a decode node"],
)
def test_what_dies_is_placed_again_and_streams_are_exact(
    system: UpOnRay, hosts: RayHosts, expected: list[str], kill: Callable[[RayHosts, psutil.Process], None], name: str
) -> None:
    before = services()
    assert asyncio.run(_crowd(system.url, lambda: kill(hosts, before[name]))) == expected
    wait_until(lambda: services().get(name, before[name]) != before[name], 30, f"{name} is placed again", system.log)
    system.wait_usable(2, 2)
    assert set(services()) == set(before)
    assert asyncio.run(_crowd(system.url, None)) == expected
    if kill is _kill_host:
        hosts.add()


def test_the_reconciler_may_die_and_come_back(system: UpOnRay, expected: list[str]) -> None:
    before = {node: process.pid for node, process in services().items()}
    assert asyncio.run(_crowd(system.url, system.kill)) == expected
    system.start()
    system.wait_usable(2, 2)
    took_over = lambda: system.log_file.read_text().rpartition("goes on with the shape in Redis")  # noqa: E731
    wait_until(lambda: took_over()[1] and "ready at" in took_over()[2], 30, "it has taken over", system.log)
    assert {node: process.pid for node, process in services().items()} == before


def test_scale_up_and_down_without_a_token_lost(
    system: UpOnRay, hosts: RayHosts, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(system.log_file.parent))

    def scale(**counts: int) -> None:
        words = [f"{role}={count}" for role, count in counts.items()]
        done = CliRunner().invoke(admin, ["scale", *words])
        assert done.exit_code == 0, done.output

    hosts.add()
    scale(decode=3)
    system.wait_usable(2, 3)
    assert asyncio.run(_crowd(system.url, lambda: scale(decode=2, prefill=1))) == expected
    system.wait_usable(1, 2)
    wait_until(lambda: set(services()) == {"router", "prefill-0", "decode-0", "decode-1"}, 30, "two ended", system.log)
    refused = CliRunner().invoke(admin, ["scale", "decode=0"])
    assert refused.exit_code == 1
    assert "decode must be a number from 1" in refused.output
    scale(prefill=2)
    system.wait_usable(2, 2)


def test_what_cannot_be_placed_is_named(hosts: RayHosts, redis: RedisServer, tmp_path: Path) -> None:
    up = UpOnRay(hosts, redis, tmp_path, "--cluster", "large", "--decode-tp", "64", "--decode-pp", "1")
    up.start()
    assert up.process is not None
    assert up.process.wait(90) == 78
    assert "decode-0 needs 1 CPU for each of its 64 ranks" in up.log()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--redis-url", "none"], "--on ray needs --redis-url"),
        (["--tls", "true"], "--tls works on one machine"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers at --address 127.0.0.1:1"),
    ],
)
def test_bad_input_is_one_sentence(
    hosts: RayHosts, redis: RedisServer, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    up = UpOnRay(hosts, redis, tmp_path, "--cluster", "other", *arguments)
    up.start()
    assert up.process is not None
    assert up.process.wait(60) == 78
    assert sentence in up.log()

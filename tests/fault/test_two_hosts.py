"""Prefill and decode node on separate hosts: exact tokens, and what happens to streams when the link between them fails.

Hosts are network namespaces that the test makes itself, as root. Both nodes listen on every interface, as in a
container, and must register the address that the other can reach. Router and Redis, on a third host, reach
both at all times: what fails is the link between the two, in the middle of a relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import warm_start
from support.network_hosts import Host, Network, why_not
from support.oracle import TINY, first_difference, greedy, make_tiny
from support.system import START_TIMEOUT_S, System, wait_until

from common.cluster.redis_server import find_redis_binary
from common.control.frames import SILENCE_S
from common.model.config import load_model_config
from common.model.description import multi_head

MODEL = "llama"
NEW_TOKENS = 24
PROMPT_TOKENS = 1600
STREAMS = 4
TRANSFER_TIMEOUT_S = 25.0
"""Longer than it may take to detect a dead link, so that a test can distinguish the two."""
RELAY_MBIT_S = 20.0
"""Slow enough that a relay of `STREAMS` prompts takes seconds."""

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"two hosts: {REASON}")


@dataclass
class TwoHosts:
    """The running system."""

    system: System
    prefill: Host
    decode: Host
    model: Path
    block_bytes: int

    def cut(self) -> None:
        self.prefill.drop_packets_to(self.decode)
        self.decode.drop_packets_to(self.prefill)

    def mend(self) -> None:
        self.prefill.restore_packets_to(self.decode)
        self.decode.restore_packets_to(self.prefill)


@contextlib.contextmanager
def running(folder: Path, model: Path, network: Network) -> Iterator[TwoHosts]:
    """Redis and router on one host, a node on each of the others; all ended in order."""
    front, prefill, decode = (network.hosts[name] for name in ("front", "prefill", "decode"))
    redis_url = f"redis://{front.address}:6379/0"
    kvrelay = [sys.executable, "-m", "kvrelay"]
    everybody = ["--redis-url", redis_url, "--lease-s", "3"]
    node = [*everybody, "--host", "0.0.0.0", "--model", str(model), "--dtype", "float32", "--kv-blocks", "1000"]
    node += ["--transfer-timeout-s", str(TRANSFER_TIMEOUT_S), "--threads", "1"]
    redis = [find_redis_binary(), "--bind", front.address, "--protected-mode", "no", "--save", "", "--dir", str(folder)]
    router = [*kvrelay, "router", "--host", front.address, "--port", "8000", *everybody, "--local-prefill-tokens", "0"]
    log_file = folder / "services.log"
    env = {**os.environ, "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
    processes: list[warm_start.Process] = []
    with log_file.open("wb") as log:
        try:
            processes.append(front.start(redis, log, env))
            wait_until(lambda: "ready to accept" in log_file.read_text(errors="replace").lower(), 10, "Redis is up")
            processes.append(warm_start.start([*kvrelay, "prefill", *node], log, env, prefill))
            processes.append(warm_start.start([*kvrelay, "decode", *node], log, env, decode))
            processes.append(warm_start.start(router, log, env, front))
            system = System(f"http://{front.address}:8000", folder / "none", log_file, processes[-1])
            wait_until(
                lambda: (system.health().get("prefill"), system.health().get("decode")) == (1, 1),
                START_TIMEOUT_S,
                "both nodes are usable",
                system.log_tail,
            )
            config = load_model_config(model)
            heads = multi_head(config.layers[0])
            block_bytes = config.num_layers * 2 * 16 * heads.num_kv_heads * heads.head_dim * 4
            yield TwoHosts(system, prefill, decode, model, block_bytes)
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGINT if process is not processes[0] else signal.SIGTERM)
            codes = [process.wait(30) for process in reversed(processes)]
    assert codes == [0] * 4, f"exit codes {codes}; log:\n{system.log_tail()}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("two-hosts")
    model = make_tiny(MODEL, folder / MODEL)
    with Network("front", "prefill", "decode") as network, running(folder, model, network) as two:
        yield two


@pytest.fixture(autouse=True)
def link_as_new(hosts: TwoHosts) -> Iterator[None]:
    """Each test finds the link whole and in use again, and leaves both pools whole."""
    yield
    hosts.mend()
    hosts.prefill.slow_down(None)
    hosts.system.wait_whole()
    wait_for_relays(hosts)


def wait_for_relays(hosts: TwoHosts) -> None:
    """Wait until a relay works again: connections recover after a while, and nodes that failed are avoided at first."""
    until_s = time.monotonic() + 60
    while (answer := complete_all(hosts, make_prompts(time.monotonic_ns(), count=1))[0][0]).prefill != "relayed":
        assert time.monotonic() < until_s, f"no relay any more: {answer}; log:\n{hosts.system.log_tail(80)}"


def make_prompts(seed: int, count: int = STREAMS) -> list[list[int]]:
    """Long prompts that nobody has in a cache."""
    draw = random.Random(seed)
    vocab_size = TINY[MODEL].vocab_size
    return [[draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS + 37 * n)] for n in range(count)]


@dataclass
class Answer:
    """How one request ended."""

    status: int
    body: dict[str, Any]
    prefill: str
    attempt: int

    @property
    def tokens(self) -> list[int]:
        return self.body["choices"][0]["token_ids"]


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """One greedy completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
    headers = answer.headers
    return Answer(
        answer.status_code,
        answer.json(),
        headers.get("x-kvrelay-prefill-mode", ""),
        int(headers.get("x-kvrelay-attempt", 0)),
    )


def complete_all(
    hosts: TwoHosts, prompts: list[list[int]], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> tuple[list[Answer], float]:
    """All prompts at once, `meanwhile` beside them; the answers, and how long the last took after `meanwhile`."""

    async def run() -> tuple[list[Answer], float]:
        async with httpx.AsyncClient(base_url=hosts.system.url, timeout=60.0, trust_env=False) as client:
            requests = [asyncio.create_task(complete(client, prompt)) for prompt in prompts]
            if meanwhile is not None:
                await meanwhile()
            start = time.monotonic()
            return await asyncio.gather(*requests), time.monotonic() - start

    return asyncio.run(run())


def check_exact(hosts: TwoHosts, prompts: list[list[int]], answers: list[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, f"{answer.body}; log:\n{hosts.system.log_tail(80)}"
        where = first_difference(greedy(hosts.model, prompt, NEW_TOKENS), answer.tokens)
        assert where is None, f"prompt of {len(prompt)}: token {where} is {answer.tokens[where]}"


def relay_bytes(hosts: TwoHosts, prompts: list[list[int]]) -> int:
    return sum(-(-len(prompt) // 16) for prompt in prompts) * hosts.block_bytes


def relay_is_under_way(hosts: TwoHosts, prompts: list[list[int]]) -> Callable[[], Awaitable[None]]:
    """Returns when a quarter of these prompts' KV has left the prefill node."""
    before, wanted = hosts.prefill.sent_bytes(), relay_bytes(hosts, prompts) / 4

    async def wait() -> None:
        async with asyncio.timeout(30):
            while hosts.prefill.sent_bytes() - before < wanted:
                await asyncio.sleep(0.02)

    return wait


def test_tokens_are_exact_and_every_prompt_is_relayed(hosts: TwoHosts) -> None:
    prompts = [*make_prompts(1), [5, 6, 7], list(range(3, 51))]
    before = hosts.system.metric("kvrelay_relayed_bytes_total")
    answers, _ = complete_all(hosts, prompts)
    check_exact(hosts, prompts, answers)
    assert {answer.prefill for answer in answers} == {"relayed"}
    assert hosts.system.metric("kvrelay_relayed_bytes_total") - before == relay_bytes(hosts, prompts)
    for role in ("prefill", "decode"):
        by_zmq = hosts.system.metric("kvrelay_relay_bytes_total", role=role, transport="zmq")
        assert by_zmq == hosts.system.metric("kvrelay_relay_bytes_total", role=role) > 0, "no memory is shared here"


def test_a_slow_link_delays_and_changes_nothing_else(hosts: TwoHosts) -> None:
    prompts = make_prompts(2)
    hosts.prefill.slow_down(50.0)
    answers, wall_s = complete_all(hosts, prompts)
    check_exact(hosts, prompts, answers)
    assert {(answer.prefill, answer.attempt) for answer in answers} == {("relayed", 1)}
    assert wall_s > 0.8 * relay_bytes(hosts, prompts) * 8 / 50e6, "the link was not slow"


def test_a_link_cut_for_three_seconds_costs_time_and_no_token(hosts: TwoHosts) -> None:
    prompts = make_prompts(3)
    hosts.prefill.slow_down(RELAY_MBIT_S)
    under_way = relay_is_under_way(hosts, prompts)

    async def cut_and_mend() -> None:
        await under_way()
        hosts.cut()
        await asyncio.sleep(3.0)
        hosts.mend()

    answers, wall_s = complete_all(hosts, prompts, cut_and_mend)
    check_exact(hosts, prompts, answers)
    assert wall_s < SILENCE_S + 10


@pytest.mark.parametrize(
    "lost",
    [
        "both ways",
        pytest.param("to the decode node", marks=pytest.mark.thorough),
        pytest.param("to the prefill node", marks=pytest.mark.thorough),
    ],
)
def test_a_dead_link_is_noticed_and_the_answers_are_still_right(hosts: TwoHosts, lost: str) -> None:
    """The decode node computes the prompts itself then: at once after the silence, not after a transfer's deadline."""
    prompts = make_prompts(100 + len(lost))
    hosts.prefill.slow_down(RELAY_MBIT_S)
    under_way = relay_is_under_way(hosts, prompts)

    async def lose() -> None:
        await under_way()
        if lost != "to the prefill node":
            hosts.prefill.drop_packets_to(hosts.decode)
        if lost != "to the decode node":
            hosts.decode.drop_packets_to(hosts.prefill)

    answers, wall_s = complete_all(hosts, prompts, lose)
    check_exact(hosts, prompts, answers)
    assert wall_s < TRANSFER_TIMEOUT_S, "only the transfer's own deadline ended it"
    hosts.system.wait_whole(timeout_s=5)
    assert (hosts.system.health()["prefill"], hosts.system.health()["decode"]) == (1, 1), "the router reaches both"


def test_requests_that_come_while_the_link_is_dead_are_served_and_relays_resume_afterwards(hosts: TwoHosts) -> None:
    dead, alive = make_prompts(7, count=2), make_prompts(8, count=2)
    hosts.cut()
    answers, wall_s = complete_all(hosts, dead)
    check_exact(hosts, dead, answers)
    assert wall_s < TRANSFER_TIMEOUT_S
    hosts.mend()
    wait_for_relays(hosts)
    answers, wall_s = complete_all(hosts, alive)
    check_exact(hosts, alive, answers)
    assert wall_s < TRANSFER_TIMEOUT_S
    assert {(answer.prefill, answer.attempt) for answer in answers} == {("relayed", 1)}

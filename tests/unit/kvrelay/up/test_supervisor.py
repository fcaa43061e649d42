"""What the supervisor waits for at the start, and what it does where a child cannot be started."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from common.config.service_configs import UpConfig
from kvrelay.up.fork_client import ForkedProcess, ForkServer
from kvrelay.up.pid_file import PidFile
from kvrelay.up.plan import ChildSpec
from kvrelay.up.supervisor import Supervisor


def test_start_waits_until_every_router_sees_all_nodes_and_names_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        specs = [ChildSpec(f"router-{n}", "router", ("true",), url=f"http://{n}") for n in range(3)]
        cluster = Supervisor(UpConfig(routers=3), specs, "redis://127.0.0.1:1", PidFile(None))
        seeing = {"http://1"}

        async def sees(url: str, counts: Mapping[str, int]) -> bool:
            return url in seeing

        monkeypatch.setattr(cluster._health.probe, "sees", sees)
        assert cluster._missing() == "router-0, router-1, router-2"
        assert await cluster._find_waiting_routers() == ["router-0", "router-2"]
        for child in cluster._children:
            child.ready = True
        assert cluster._missing() == "router-0, router-2 to see all nodes and serve their models"
        seeing |= {"http://0", "http://2"}
        assert not await cluster._find_waiting_routers()
        await cluster._health.close()

    asyncio.run(main())


def test_restart_that_fails_for_lack_of_processes_is_retried_and_affects_no_other_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node may die of the same shortage that prevents its restart: others keep running, the restart is retried."""

    async def main() -> None:
        cluster = Supervisor(
            UpConfig(), [ChildSpec("decode-0", "decode", ("true",))], "redis://127.0.0.1:1", PidFile(None)
        )
        child = cluster._children[0]
        start, tries = child.start, 0

        async def fails_once() -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            cluster._stop.set()
            await start()

        monkeypatch.setattr(child, "start", fails_once)
        with pytest.raises(BlockingIOError):
            await cluster._supervise(child)
        child.policy.ready(time.monotonic())
        tries = 0
        await asyncio.wait_for(cluster._supervise(child), 20)
        assert tries == 2
        await cluster._health.close()

    asyncio.run(main())


def test_a_stop_does_not_wait_for_a_fork_server_that_is_still_importing() -> None:
    """Ctrl-C had no effect, and neither had a second one, until PyTorch was imported: on a cold disk up to a minute."""

    class Importing(ForkServer):
        def __init__(self) -> None:
            self.asked = asyncio.Event()

        async def fork(self, argv: Sequence[str], environ: Mapping[str, str], model_path: str) -> ForkedProcess:
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    async def main() -> None:
        specs = [ChildSpec("decode-0", "decode", ("true",), node_id="d0")]
        server = Importing()
        cluster = Supervisor(UpConfig(), specs, "redis://127.0.0.1:1", PidFile(None), fork_servers={"decode": server})
        running = asyncio.create_task(cluster.run())
        await server.asked.wait()
        cluster._on_signal(signal.SIGINT)
        await asyncio.wait_for(running, 5)

    asyncio.run(main())


def test_a_signal_that_is_sent_twice_is_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout kvrelay up` killed all services instead of ending them in order."""
    now_s = 100.0
    monkeypatch.setattr("kvrelay.up.supervisor.time", SimpleNamespace(monotonic=lambda: now_s))

    async def main() -> None:
        nonlocal now_s
        cluster = Supervisor(UpConfig(), [], "redis://127.0.0.1:1", PidFile(None))
        cluster._on_signal(signal.SIGTERM)
        cluster._on_signal(signal.SIGTERM)
        assert cluster._stop.is_set()
        assert not cluster._kill_now.is_set()
        now_s += 1.0
        cluster._on_signal(signal.SIGINT)
        assert cluster._kill_now.is_set()
        await cluster._health.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "shown"),
    [(UpConfig(), False), (UpConfig(api_key="k"), True), (UpConfig(api_key_file="keys.toml"), True)],
)
def test_the_example_request_has_a_key_where_one_is_needed(
    config: UpConfig, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        cluster = Supervisor(config, [ChildSpec("router", "router", ("true",))], "redis://127.0.0.1:1", PidFile(None))
        record = SimpleNamespace(model=SimpleNamespace(name="m", task="generate"), kernels="numpy")
        monkeypatch.setattr(cluster._health, "records", {"d0": record})
        await cluster._announce(1.0)
        await cluster._health.close()

    asyncio.run(main())
    assert ('-H "Authorization: Bearer $KVRELAY_API_KEY"' in capsys.readouterr().out) is shown

"""What the router process imports, and what ends its start."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.stub_node import make_model_folder

from common.base.errors import ConfigError
from common.config.service_configs import RouterConfig
from router.router import Router
from router.service import _directory, serve


def test_router_imports_no_torch_no_transformers_and_no_kvtransfer() -> None:
    program = "import router.service, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "router" in loaded
    assert not loaded & {"torch", "transformers", "kvtransfer", "prefill_node", "decode_node"}


def test_port_in_use_is_one_clear_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            asyncio.run(serve(RouterConfig(port=port)))


def test_wrong_configuration_ends_the_start_and_frees_the_port(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for config in (
        RouterConfig(port=port, policy="fastest"),
        RouterConfig(port=port, model=str(tmp_path / "nowhere")),
        RouterConfig(port=port, model=str(make_model_folder(tmp_path / "m")), chat_template=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError):
            asyncio.run(serve(config))
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_metrics_show_how_many_nodes_answer_without_a_record_in_redis() -> None:
    """As where Redis is full: it answers, so that `kvrelay_redis_away` is 0."""

    async def main() -> None:
        config = RouterConfig()
        router = Router(config)
        directory = _directory(router, config)
        directory.unrenewed = ["d0", "d1"]
        assert b"kvrelay_nodes_unrenewed 2.0" in router.metrics.render()
        router.close()
        await directory.close()

    asyncio.run(main())

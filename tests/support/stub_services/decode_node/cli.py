"""Stands in for a node under `kvrelay up`: registers, and misbehaves as the environment says.

STUB_<ROLE>: `refuse` ends with a ConfigError, `hang` never registers, `stubborn` ignores SIGTERM; `hang-if:PATH` hangs
while that file is there; `parent` has a child that outlives it by a second.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from typing import Any

from common.base.errors import ConfigError
from common.base.process import run_service
from common.cluster.membership import Registrar
from common.config.cli import service_app
from common.config.service_configs import DecodeConfig, NodeConfig
from common.config.sources import Resolved
from common.control.messages import ModelInfo, NodeRecord, PeerRef
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec


async def _serve(config: NodeConfig, role: Any) -> None:
    assert config.node_id is not None
    print(f"max_num_seqs {config.max_num_seqs}, seed {config.seed}", flush=True)
    manner = os.environ.get(f"STUB_{role.upper()}", "")
    if manner == "refuse":
        raise ConfigError("the model folder /nowhere does not exist")
    if manner == "hang" or (manner.startswith("hang-if:") and os.path.exists(manner.removeprefix("hang-if:"))):
        await asyncio.Event().wait()
    if manner == "parent" and os.fork() == 0:
        os.setsid()
        node = os.getppid()
        while os.getppid() == node:
            time.sleep(0.1)
        time.sleep(1)
        os._exit(0)
    if manner == "stubborn":
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    peer = PeerRef(config.node_id, secrets.token_hex(8), f"tcp://127.0.0.1:{os.getpid() % 60000}", [])
    layout = KVLayout("f" * 8, KVSpec.uniform(2, 2, 16, "float32"))
    record = NodeRecord(role, peer, ModelInfo("stub-model", "/m", 100, 64), layout, 10, time.time())
    registrar = Registrar(config.redis_url, config.cluster, record, lease_s=config.lease_s, tls_dir=config.tls_dir)
    try:
        await registrar.run()
    finally:
        await registrar.deregister()
        print("bye", flush=True)


def preload() -> None:
    """For the fork server."""


def node_app(cls: type[Any], role: str) -> Any:
    def run(resolved: Resolved[Any]) -> None:
        run_service(lambda: _serve(resolved.config, role))

    return service_app(cls, help="A stub.", run=run)


app = node_app(DecodeConfig, "decode")

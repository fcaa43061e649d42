"""The children that `kvrelay up` would start, without starting any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.config.service_configs import UpConfig
from common.config.sources import resolve
from kvrelay.up.models import UpModel
from kvrelay.up.plan import ChildSpec, plan_children
from kvrelay.up.routers import RouterPlace


def planned(environ: Mapping[str, str], flags: Mapping[str, str] | None = None, *, gpu: str = "") -> list[ChildSpec]:
    """The plan for these variables and options, on a host with that GPU, if any."""
    up = resolve(UpConfig, flags=dict(flags or {}), environ=environ, file=None)
    return plan_children(
        up.config,
        up.sources,
        [UpModel(up.config.model, "generate", Path(up.config.model))],
        redis_url="redis://127.0.0.1:7/0",
        routers=[RouterPlace("router", 9000, 9001, "http://127.0.0.1:9000", "http://127.0.0.1:9001")],
        own_redis=("redis-server",),
        host_name="box",
        admin_token="the-admin-token",
        gpus=[gpu] if gpu else [],
    )

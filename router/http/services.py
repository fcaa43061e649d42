"""What the HTTP routes work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.config.router_options import ClientOptions
from router.http.background_responses import BackgroundResponses
from router.http.body_work import BodyWork
from router.http.key_limits import ApiKeys
from router.http.response_store import ResponseStore
from router.metrics import Metrics
from router.models.adapter_control import AdapterControl
from router.models.catalog import ModelCatalog
from router.requests.deadlines import Deadlines
from router.requests.dispatch import Dispatcher


@dataclass(frozen=True)
class Services:
    """The parts of the router that routes call."""

    dispatcher: Dispatcher
    catalog: ModelCatalog
    metrics: Metrics
    adapters: AdapterControl
    degraded: Callable[[], str]
    """What is wrong with Redis; empty if nothing is."""
    max_body_bytes: int
    body_deadlines: Deadlines[asyncio.Task[Any]]
    """When each request body must have arrived; made by `router.http.body.body_deadlines`."""
    body_work: BodyWork
    api_keys: ApiKeys
    options: ClientOptions
    settings: Mapping[str, Any]
    """The options that `/server_info` shows."""
    responses: ResponseStore | None
    """Where responses of `/v1/responses` are stored; None: nowhere."""
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    whole_vocabulary: set[object] = field(default_factory=set[object])
    """The answers in work that have log-probabilities of the whole vocabulary."""

"""The transports of the conformance suite: each of its tests runs on every one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.transfer_harness import Cluster, Recorder, layout
from support.transport_conformance import TRANSPORTS, relay_threads

from common.control.messages import AttemptKey
from common.engine.kv_transfer import OpenDestinationOrder, OpenSourceOrder
from common.kv.rank_layout import KVLayout


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return TRANSPORTS[request.param]()


@pytest.fixture
def make(transport: Any) -> Iterator[Any]:
    """Makes clusters. Checks at the end that every open was released once and no thread is left."""
    clusters: list[Cluster] = []
    opened: list[tuple[Recorder, AttemptKey]] = []

    def factory(src: KVLayout | None = None, dst: KVLayout | None = None, **kw: Any) -> Cluster:
        cluster = Cluster(transport, src or layout(), dst or layout(), **kw)
        clusters.append(cluster)
        for rank in [*cluster.senders, *cluster.receivers]:
            real_apply, recorder = rank.end.apply, rank.recorder

            def apply(order: Any, real_apply: Any = real_apply, recorder: Recorder = recorder) -> None:
                real_apply(order)
                if isinstance(order, OpenSourceOrder | OpenDestinationOrder):
                    opened.append((recorder, order.plan.key))

            rank.end.apply = apply
        return cluster

    yield factory
    for cluster in clusters:
        cluster.close()
    assert not relay_threads()
    for recorder, key in opened:
        kinds = [type(e).__name__ for e in recorder.of(key, object)]
        times = opened.count((recorder, key))
        assert sum(k.endswith("Released") for k in kinds) == times, (key, kinds)
        assert kinds[-1].endswith("Released"), (key, kinds)

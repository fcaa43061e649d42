"""Prometheus metrics of the prefix index and its subscriber, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.index.kv_event_subscriber import KvEventSubscriber
from router.index.prefix_index import PrefixIndex


class IndexCollector(Collector):
    """Metrics of one index."""

    def __init__(self, index: PrefixIndex, subscriber: KvEventSubscriber) -> None:
        self._index = index
        self._subscriber = subscriber

    def collect(self) -> Iterable[Metric]:
        index, subscriber = self._index, self._subscriber
        gauges: dict[str, tuple[str, float]] = {
            "kvrelay_redis_away": ("1 while Redis does not answer this router.", subscriber.away),
            "kvrelay_index_blocks": ("Blocks in the prefix index.", len(index)),
            "kvrelay_index_nodes_behind": ("Nodes whose snapshot is being read.", len(subscriber.behind)),
            "kvrelay_index_nodes_silent": (
                "Nodes that hold blocks although none ever reached the index: prefix routing is off for them.",
                len(subscriber.silent),
            ),
            "kvrelay_index_lag_seconds": ("Age of the last stream entry when it was applied.", subscriber.lag_s),
        }
        counters: dict[str, tuple[str, float]] = {
            "kvrelay_index_events": ("Blocks reported as stored or removed.", subscriber.blocks),
            "kvrelay_index_batches": ("Stream entries applied.", subscriber.entries),
            "kvrelay_index_gaps": ("Gaps found in the nodes' streams.", subscriber.gaps),
            "kvrelay_index_snapshots": ("Snapshots of nodes' blocks read.", subscriber.snapshots),
            "kvrelay_index_evicted_blocks": ("Blocks evicted because the index was full.", index.evicted),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=float(value))
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=float(value))

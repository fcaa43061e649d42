"""What the prefix index and its follower export to Prometheus, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.index.kv_event_subscriber import Follower
from router.index.prefix_index import PrefixIndex


class IndexCollector(Collector):
    """Figures of one index."""

    def __init__(self, index: PrefixIndex, follower: Follower) -> None:
        self._index = index
        self._follower = follower

    def collect(self) -> Iterable[Metric]:
        index, follower = self._index, self._follower
        gauges: dict[str, tuple[str, float]] = {
            "kvrelay_redis_away": ("1 while Redis does not answer this router.", follower.away),
            "kvrelay_index_blocks": ("Blocks that the prefix index knows.", len(index)),
            "kvrelay_index_nodes_behind": ("Nodes whose blocks are being read anew.", len(follower.behind)),
            "kvrelay_index_nodes_silent": (
                "Nodes that hold blocks of which none ever reached the index: prefix routing is off for them.",
                len(follower.silent),
            ),
            "kvrelay_index_lag_seconds": ("Age of the last event when it was applied.", follower.lag_s),
        }
        counters: dict[str, tuple[str, float]] = {
            "kvrelay_index_events": ("Blocks reported as stored or removed.", follower.blocks),
            "kvrelay_index_batches": ("Stream entries applied.", follower.entries),
            "kvrelay_index_gaps": ("Gaps found in nodes' streams.", follower.gaps),
            "kvrelay_index_snapshots": ("Whole sets of blocks read.", follower.snapshots),
            "kvrelay_index_evicted_blocks": ("Blocks forgotten because the index was full.", index.evicted),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=float(value))
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=float(value))

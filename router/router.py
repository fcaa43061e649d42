"""Creates and connects the parts of a router: model, metrics, prefix index, dispatcher. Runs on its event loop."""

from __future__ import annotations

from common.base.sentences import counted
from common.cluster.membership import Directory
from common.config.service_configs import RouterConfig
from common.control.messages import NodeRecord
from router.index.kv_event_subscriber import KvEventSubscriber
from router.index.metrics import IndexCollector
from router.index.prefix_index import PrefixIndex
from router.metrics import Metrics
from router.models.catalog import ModelCatalog
from router.node_metrics import NodeCollector
from router.requests.dispatch import Dispatcher
from router.requests.request import TraceContext
from router.tracing.exporter import Traces

NO_TRACE = TraceContext()


class Router:
    """All parts of a router except the HTTP server and the directory of nodes. Must be created on the event loop.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.cluster = config.cluster
        self.metrics = Metrics()
        self.catalog = ModelCatalog(config)
        self.index = PrefixIndex(config.index_blocks)
        self.dispatcher = dispatcher = Dispatcher(config, self.metrics, index=self.index)
        self._traces = traces = Traces(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
        if traces is not None:
            dispatcher.stories.on_end = lambda story: traces.record(story.plain(), story.trace or NO_TRACE)
        self.subscriber: KvEventSubscriber | None = None
        nodes = NodeCollector(dispatcher.nodes.known, dispatcher.breakers, lambda: self.catalog.roles)
        self.metrics.registry.register(nodes)
        self.metrics.watch_queue(lambda: dispatcher.running, lambda: dispatcher.waiting, lambda: dispatcher.queued)

    def set_nodes(self, records: list[NodeRecord]) -> None:
        """Use these nodes and no others: the ones that membership lists now."""
        accepted = self.catalog.accept(records)
        self.dispatcher.set_nodes(accepted)
        if self.subscriber is not None:
            self.subscriber.set_nodes(accepted)

    def subscribe(self, redis_url: str, cluster: str) -> KvEventSubscriber:
        """Return a subscriber that, while it runs, feeds the prefix index with the KV events in Redis."""
        nodes = self.dispatcher.nodes
        loads = lambda: {node.incarnation: node.load for node in nodes.known()}  # noqa: E731
        self.subscriber = KvEventSubscriber(redis_url, cluster, self.index, loads=loads)
        self.metrics.registry.register(IndexCollector(self.index, self.subscriber))
        return self.subscriber

    def degraded(self, directory: Directory | None) -> str:
        """What is wrong with Redis, in a few words; empty if everything works."""
        subscriber = self.subscriber
        if (directory is not None and directory.degraded) or (subscriber is not None and subscriber.away):
            return "away: serving with the nodes known"
        if directory is not None and directory.unrenewed:
            count = counted(len(directory.unrenewed), "node answers/nodes answer")
            return f"{count} whose records have ended: it takes no writes"
        if subscriber is not None and subscriber.silent:
            return f"blocks of {counted(len(subscriber.silent), 'node')} never reached the prefix index"
        return ""

    def close(self) -> None:
        """End all requests, close all links."""
        if self._traces is not None:
            self._traces.close()
        self.catalog.close()
        self.dispatcher.close()

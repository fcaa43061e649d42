"""The transports side by side, 64 MiB between two nodes on this machine; and what changing the layout on the way costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from load.raw_zmq import raw_zmq_rate
from load.relay_ends import RECEIVERS
from load.results import Result, Target, median
from load.session import Session
from load.worker import PASSIVE, Worker

from common.hashing import BLOCK_SIZE

_MIB = 2**20
_SIZE = 64 * _MIB
_EQUAL = ((1, 1), (1, 1))
_PAIRS = {
    "tp 1 -> tp 2": ((1, 1), (2, 1)),
    "tp 2 -> tp 1": ((2, 1), (1, 1)),
    "tp 1 -> pp 2": ((1, 1), (1, 2)),
    "tp 2 -> pp 2": ((2, 1), (1, 2)),
}
Layout = tuple[int, int]


@dataclass(frozen=True)
class _KVShape:
    name: str
    layers: int
    kv_heads: int
    head_dim: int

    def sizes(self) -> dict[str, Any]:
        """As `RelaySource` takes them: one transfer of `_SIZE`, in whole blocks."""
        token_bytes = 2 * 2 * self.layers * self.kv_heads * self.head_dim
        tokens = _SIZE // (token_bytes * BLOCK_SIZE) * BLOCK_SIZE
        model = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {**model, "tokens": tokens, "transfers": 1, "shuffled": True}


def run(session: Session) -> Result:
    """Every transport at equal layouts beside memcpy, then each resharding against its own transport's equal layout."""
    result = Result("transports")
    session.stop_system()
    session.stop_plain()
    own = session.shape
    shapes = [
        _KVShape(f"{own.kv_heads} KV heads of {own.head_dim}", own.layers, own.kv_heads, own.head_dim),
        _KVShape("8 KV heads of 128", 16, 8, 128),
    ]
    for shape in shapes:
        rates = {name: _Ranks(session, name, shape).measure() for name in RECEIVERS}
        if shape is shapes[0]:
            _compare(session, result, rates)
        _resharding(result, shape, rates)
        result.details[shape.name] = {name: ranks.rates for name, ranks in rates.items()}
    return result


class _Ranks:
    """All ranks that one transport's measurements need, each a process of its own."""

    def __init__(self, session: Session, transport: str, shape: _KVShape) -> None:
        self._session = session
        self._common = {"transport": transport, **shape.sizes()}
        self.rates: dict[str, list[float]] = {}
        """Bytes/s of every round, by pair of layouts."""
        self.copy_alone: list[float] = []
        self.copy_both: list[float] = []

    def measure(self) -> _Ranks:
        """Rounds in which every pair of layouts has its turn."""
        workers: list[Worker] = []

        def node(kind: str, layout: Layout) -> list[Worker]:
            target = f"load.relay_ends:{kind}"
            ranks: list[Worker] = []
            for rank in range(layout[0] * layout[1]):
                ranks.append(Worker(target, environ=PASSIVE, layout=layout, rank=rank, **self._common))
                workers.append(ranks[-1])
            return ranks

        try:
            sources = {layout: node("RelaySource", layout) for layout in ((1, 1), (2, 1))}
            targets = {layout: node("RelayDestination", layout) for layout in ((1, 1), (2, 1), (1, 2))}
            number = 0
            turns = self._session.repeats(9, 3)
            for turn in range(turns):
                self._copy(sources[1, 1][0], targets[1, 1][0])
                for name, (src, dst) in {"equal": _EQUAL, **_PAIRS}.items():
                    number += 1
                    rate = _relay(number, src, sources[src], dst, targets[dst])
                    if turn in (0, turns - 1):
                        assert all(target.call("intact") for target in targets[dst]), (
                            f"{name}: the KV is not its source's"
                        )
                    if turn:  # the first one connects and touches the memory
                        self.rates.setdefault(name, []).append(rate)
        finally:
            for worker in workers:
                worker.close()
        return self

    def _copy(self, one: Worker, other: Worker) -> None:
        self.copy_alone.append(one.call("copy_rate", size_bytes=_SIZE))
        for worker in (one, other):
            worker.start("copy_rate", size_bytes=_SIZE)
        self.copy_both.append(min([worker.result() for worker in (one, other)]))


def _relay(number: int, src: Layout, sources: list[Worker], dst: Layout, targets: list[Worker]) -> float:
    """Bytes/s from the first grant to the last rank's last verified slice."""
    for target in targets:
        target.call("expect", number=number, layout=src)
    for source in sources:
        source.call("prepare", number=number)
    addresses = [target.call("address") for target in targets]
    for target in targets:
        target.start("arrived")
    for source in sources:
        source.start("send", number=number, addresses=addresses, layout=dst)
    started = [source.result() for source in sources]
    ends = [target.result() for target in targets]
    received = sum(size for _, size in ends)
    return received / (max(ended for ended, _ in ends) - min(started))


def _compare(session: Session, result: Result, by_name: dict[str, _Ranks]) -> None:
    alone = max(rate for ranks in by_name.values() for rate in ranks.copy_alone)
    both = max(rate for ranks in by_name.values() for rate in ranks.copy_both)
    raw = max(raw_zmq_rate(2 * _MIB, session.repeats(256, 32)) for _ in range(session.repeats(3)))
    result.add("memcpy of 64 MiB, one process", alone / 1e9, "GB/s")
    result.add(
        "memcpy of 64 MiB, each of two processes", both / 1e9, "GB/s", note="a relay copies at least once at each end"
    )
    result.add("raw ZMQ, tcp loopback, 2 MiB messages", raw / 1e9, "GB/s", limit=both / 1e9, limit_name="memcpy, two")
    rates = {name: median(ranks.rates["equal"]) for name, ranks in by_name.items()}
    for name, rate in rates.items():
        result.add(f"{name}, 64 MiB, equal layouts", rate / 1e9, "GB/s", limit=both / 1e9, limit_name="memcpy, two")
    result.add("shm / zmq", rates["shm"] / rates["zmq"], "x", target=Target(5.0))


def _resharding(result: Result, shape: _KVShape, by_name: dict[str, _Ranks]) -> None:
    for name, ranks in by_name.items():
        equal = ranks.rates["equal"]
        for pair in _PAIRS:
            ratios = [rate / base for rate, base in zip(ranks.rates[pair], equal, strict=True)]
            result.add(
                f"{name}, {pair}, {shape.name}",
                median(ranks.rates[pair]) / 1e9,
                "GB/s",
                limit=median(ranks.rates[pair]) / median(ratios) / 1e9,
                limit_name="equal",
                target=Target(0.8, of_share=True),
                note="share: median of rounds",
            )

"""The transports side by side, 64 MiB between two nodes on this machine; and what changing the layout on the way costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.raw_zmq import raw_zmq_rate
from bench.results import Result, Target, median
from bench.session import Session
from bench.worker import PASSIVE, Worker

from common.base.hashing import BLOCK_SIZE

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


_ON_CPU = ("zmq", "collective", "shm")
"""Transports that need no GPU."""


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
        with _Ranks(session, shape) as ranks:
            rounds = {name: ranks.measure(name) for name in _ON_CPU}
        if shape is shapes[0]:
            _compare(session, result, rounds)
        _resharding(result, shape, rounds)
        result.details[shape.name] = {name: measured.rates for name, measured in rounds.items()}
    return result


@dataclass
class _Rounds:
    """Bytes/s of every round of one transport."""

    rates: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By pair of layouts."""
    cpu_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Processor time of all ranks of both nodes for one relay, by pair of layouts."""
    copy_alone: list[float] = field(default_factory=list[float])
    copy_both: list[float] = field(default_factory=list[float])


class _Ranks:
    """All ranks that the measurements of one shape need, each a process of its own."""

    def __init__(self, session: Session, shape: _KVShape) -> None:
        self._session = session
        self._sizes = shape.sizes()
        self._workers: list[Worker] = []
        self._number = 0

    def __enter__(self) -> _Ranks:
        try:
            self._sources = {layout: self._node("RelaySource", layout) for layout in ((1, 1), (2, 1))}
            self._targets = {layout: self._node("RelayDestination", layout) for layout in ((1, 1), (2, 1), (1, 2))}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def _node(self, kind: str, layout: Layout) -> list[Worker]:
        ranks: list[Worker] = []
        for rank in range(layout[0] * layout[1]):
            ranks.append(Worker(f"bench.relay_ends:{kind}", environ=PASSIVE, layout=layout, rank=rank, **self._sizes))
            self._workers.append(ranks[-1])
        return ranks

    def measure(self, transport: str) -> _Rounds:
        """Rounds in which every pair of layouts has its turn."""
        for worker in self._workers:
            worker.call("use", transport=transport)
        rounds = _Rounds()
        turns = self._session.repeats(17, 3)
        for turn in range(turns):
            if turn:
                self._copy(rounds)
            for name, (src, dst) in {"equal": _EQUAL, **_PAIRS}.items():
                self._number += 1
                workers = [*self._sources[src], *self._targets[dst]]
                before_s = sum(worker.call("cpu_s") for worker in workers)
                rate = relay(self._number, src, self._sources[src], dst, self._targets[dst])
                cpu_s = sum(worker.call("cpu_s") for worker in workers) - before_s
                if turn in (0, turns - 1):
                    intact = [target.call("intact") for target in self._targets[dst]]
                    assert all(intact), f"{transport}, {name}: the KV is not its source's"
                if turn:  # the first one connects and touches the memory
                    rounds.rates.setdefault(name, []).append(rate)
                    rounds.cpu_s.setdefault(name, []).append(cpu_s)
        return rounds

    def _copy(self, rounds: _Rounds) -> None:
        one, other = self._sources[1, 1][0], self._targets[1, 1][0]
        rounds.copy_alone.append(one.call("copy_rate", size_bytes=_SIZE))
        for worker in (one, other):
            worker.start("copy_rate", size_bytes=_SIZE)
        rounds.copy_both.append(min([worker.result() for worker in (one, other)]))


def relay(number: int, src: Layout, sources: list[Worker], dst: Layout, targets: list[Worker]) -> float:
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


def _compare(session: Session, result: Result, by_name: dict[str, _Rounds]) -> None:
    alone = [rate for ranks in by_name.values() for rate in ranks.copy_alone]
    both = [rate for ranks in by_name.values() for rate in ranks.copy_both]
    raw = max(raw_zmq_rate(2 * _MIB, session.repeats(256, 32)) for _ in range(session.repeats(3)))
    result.add("memcpy of 64 MiB, one process", median(alone) / 1e9, "GB/s")
    result.add(
        "memcpy of 64 MiB, each of two processes",
        median(both) / 1e9,
        "GB/s",
        note="a relay copies at least once at each end",
    )
    result.add(
        "raw ZMQ, tcp loopback, 2 MiB messages", raw / 1e9, "GB/s", limit=median(both) / 1e9, limit_name="memcpy"
    )
    for name, ranks in by_name.items():
        _against(
            result,
            f"{name}, 64 MiB, equal layouts",
            ranks.rates["equal"],
            ranks.copy_both,
            "memcpy, two",
            Target(0.7, of_share=True) if name == "shm" else None,
        )
    for name, ranks in by_name.items():
        result.add(
            f"{name}, 64 MiB, processor time of both ends",
            1e3 * median(ranks.cpu_s["equal"]),
            "ms",
            limit=1e3 * 2 * _SIZE / median(alone),
            limit_name="two memcpy",
            note="hardly changes with other work beside it",
        )
    rates = {name: median(ranks.rates["equal"]) for name, ranks in by_name.items()}
    result.add("shm / zmq", rates["shm"] / rates["zmq"], "x", target=Target(5.0))


def _resharding(result: Result, shape: _KVShape, by_name: dict[str, _Rounds]) -> None:
    for name, ranks in by_name.items():
        for pair in _PAIRS:
            title = f"{name}, {pair}, {shape.name}"
            _against(result, title, ranks.rates[pair], ranks.rates["equal"], "equal", Target(0.8, of_share=True))
            equal_ms, pair_ms = (1e3 * median(ranks.cpu_s[layouts]) for layouts in ("equal", pair))
            result.add(f"{title}, processor time", pair_ms, "ms", limit=equal_ms, limit_name="equal")


def _against(
    result: Result, title: str, rates: list[float], limits: list[float], limit_name: str, target: Target | None
) -> None:
    """A rate beside a limit that was measured in the same rounds; the share is the median of the rounds' shares."""
    share = median([rate / limit for rate, limit in zip(rates, limits, strict=True)])
    result.add(
        title,
        median(rates) / 1e9,
        "GB/s",
        limit=median(rates) / share / 1e9,
        limit_name=limit_name,
        target=target,
        note=f"share: median of rounds; best round {max(rates) / 1e9:.2f} GB/s",
    )

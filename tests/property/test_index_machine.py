"""The prefix index against a plain dict of sets, under any order of calls."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.mock_clock import MockClock

from router.index.prefix_index import EXPECTATION_S, PrefixIndex

BLOCKS = [hashlib.sha256(bytes([i])).digest()[:16] for i in range(14)]
OPTIONS = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
nodes = st.sampled_from([f"n{i}" for i in range(6)])
some = st.lists(st.sampled_from(BLOCKS), max_size=8)


class IndexMachine(RuleBasedStateMachine):
    """`held`: blocks that nodes published; `expected`: blocks that this router expects, and since when."""

    few = 1024

    @initialize()
    def start(self) -> None:
        self.clock = MockClock()
        self.index = PrefixIndex(100_000, clock=self.clock, few=self.few)
        self.held: dict[str, set[bytes]] = {}
        self.expected: dict[tuple[str, bytes], float] = {}

    @rule(node=nodes, blocks=some, blob=st.booleans())
    def stored(self, node: str, blocks: list[bytes], blob: bool) -> None:
        self.index.stored(node, b"".join(blocks) if blob else blocks)
        self.held.setdefault(node, set()).update(blocks)

    @rule(node=nodes, blocks=some, blob=st.booleans())
    def removed(self, node: str, blocks: list[bytes], blob: bool) -> None:
        self.index.removed(node, b"".join(blocks) if blob else blocks)
        if node in self.held or any(key[0] == node for key in self.expected):
            self.held.setdefault(node, set()).difference_update(blocks)
        for block in blocks:
            self.expected.pop((node, block), None)

    @rule(node=nodes, blocks=some)
    def replace(self, node: str, blocks: list[bytes]) -> None:
        self.drop(node)
        self.stored(node, blocks, True)

    @rule(node=nodes)
    def drop(self, node: str) -> None:
        self.index.drop(node)
        self.held.pop(node, None)
        self.expected = {key: at for key, at in self.expected.items() if key[0] != node}

    @rule(node=nodes, blocks=some)
    def expect(self, node: str, blocks: list[bytes]) -> None:
        self.index.expect(node, blocks)
        for block in blocks:
            self.expected[node, block] = self.clock()

    @rule(seconds=st.sampled_from([0.5, EXPECTATION_S, 3 * EXPECTATION_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(steps=st.integers(1, 400))
    def tidy(self, steps: int) -> None:
        for _ in range(steps):
            self.index.tidy()

    @rule(query=st.permutations(BLOCKS), blob=st.booleans())
    def match(self, query: list[bytes], blob: bool) -> None:
        found = self.index.match(b"".join(query) if blob else query)
        now = self.clock()
        sure = self._leading(query, {key for key, at in self.expected.items() if now - at < EXPECTATION_S})
        possible = self._leading(query, {key for key, at in self.expected.items() if now - at < 2 * EXPECTATION_S})
        assert set(sure) <= set(found) <= set(possible)
        for node, depth in found.items():
            assert sure.get(node, 0) <= depth <= possible[node]

    @invariant()
    def counts_are_right(self) -> None:
        if hasattr(self, "held"):
            assert {node: self.index.num_blocks(node) for node in self.held} == {
                n: len(b) for n, b in self.held.items()
            }
            assert len(self.index) >= len(set().union(*self.held.values()))

    def teardown(self) -> None:
        while self.index.tidy():
            pass
        assert len(self.index) == len(set().union(*self.held.values()))
        assert len(self.index._names) <= 6 * 50

    def _leading(self, query: list[bytes], expected: set[tuple[str, bytes]]) -> dict[str, int]:
        depths: dict[str, int] = {}
        for node in {*self.held, *(node for node, _ in expected)}:
            depth = 0
            while depth < len(query) and (query[depth] in self.held.get(node, ()) or (node, query[depth]) in expected):
                depth += 1
            if depth:
                depths[node] = depth
        return depths


class IndexInBulkMachine(IndexMachine):
    """The same, with every list handled as a long one."""

    few = 0


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = OPTIONS
TestIndexInBulkMachine = IndexInBulkMachine.TestCase
TestIndexInBulkMachine.settings = OPTIONS

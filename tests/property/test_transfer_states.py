"""The state machines of both ends under random orders of events, against a model of which end may access which memory.

The connection between them loses nothing, but delays and reorders; copies take arbitrarily long (batches and claims stay
open), so that aborts occur in every phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.base.errors import CorruptSlice, TransferError
from common.base.hashing import HASH_BYTES
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    DestinationReleased,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from kvtransfer.receive_state import Claim
from kvtransfer.send_state import Batch
from kvtransfer.tables import ReceiveTable, SendTable
from kvtransfer.wire import KVSlice, SliceHeader

NUM_BLOCKS = 64
SPECS = {
    "K and V": KVSpec.uniform(3, 2, 4, "float32", block_size=2),
    "groups that share a layer, one without heads": KVSpec(
        (
            LayerGroup((0, 2), (KVPlane("k", 4), KVPlane("v", 3)), 2, "float32"),
            LayerGroup((1, 2), (KVPlane("latent", 5),), 1, "bfloat16"),
        ),
        block_size=2,
    ),
}
SPLITS: list[tuple[int, tuple[int, ...]]] = [(1, ()), (2, ()), (4, ()), (1, (2, 1)), (2, (1, 2))]
Cell = tuple[int, int, int, int]
"""Group, layer in the group, head, block."""


class Relay(RuleBasedStateMachine):
    """Several attempts of two requests, from every source rank to every destination rank."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.attempts: dict[AttemptKey, dict[str, Any]] = {}
        self.batches: list[tuple[int, Batch]] = []
        self.wire: list[tuple[SliceHeader, Batch]] = []
        self.delivered: list[tuple[SliceHeader, int]] = []
        self.claims: list[tuple[int, Claim, int, Batch]] = []
        """Receiving rank, what it writes, the rank that sent it."""
        self.opened: dict[tuple[str, int, AttemptKey], int] = {}
        self.released: dict[tuple[str, int, AttemptKey], int] = {}
        self.received: set[tuple[int, AttemptKey]] = set()
        self.failed: set[tuple[int, AttemptKey]] = set()
        self.offered: dict[tuple[int, int, AttemptKey], set[Cell]] = {}
        self.placed: dict[tuple[int, AttemptKey], set[Cell]] = {}

    @initialize(spec=st.sampled_from(list(SPECS)), splits=st.tuples(st.sampled_from(SPLITS), st.sampled_from(SPLITS)))
    def nodes(self, spec: str, splits: list[tuple[int, tuple[int, ...]]]) -> None:
        self.src, self.dst = src, dst = [KVLayout("m", SPECS[spec], tp_size=tp, pp_layers=pp) for tp, pp in splits]
        self.senders = [SendTable(src, r, NUM_BLOCKS) for r in range(src.world_size)]
        self.receivers = [ReceiveTable(dst, r, NUM_BLOCKS, "d1") for r in range(dst.world_size)]

    # ---------------------------------------------------------------- what the nodes do

    @rule(
        request=st.sampled_from("ab"),
        blocks=st.integers(1, 4),
        held=st.integers(0, 4),
        timeout=st.integers(5, 60),
        ready=st.booleans(),
    )
    def begin(self, request: str, blocks: int, held: int, timeout: int, ready: bool) -> None:
        attempt = 1 + sum(k.request_id == request for k in self.attempts)
        key = AttemptKey(request, attempt)
        hashes = [bytes([ord(request), attempt, i]).ljust(HASH_BYTES) for i in range(blocks)]
        ids = list(range(blocks))
        held = min(held, blocks)
        final = [[0] * s.num_layers for s in self.src.shards()]
        self.attempts[key] = {"blocks": blocks, "held": held, "hashes": hashes, "final": final, "granted": False}
        src = PeerRef("p", "s1", "", [])
        for r, receiver in enumerate(self.receivers):
            plan = TransferPlan(key, [ids], [held], hashes, float(timeout))
            receiver.open(OpenDestinationOrder(plan, src, self.src), self.now)
            self.opened["d", r, key] = 1
        for r, sender in enumerate(self.senders):
            sender.open(OpenSourceOrder(TransferPlan(key, [ids], [0], hashes, float(timeout))))
            self.opened["s", r, key] = 1
        if ready:
            self.all_final(key)
            self.give_grant(key)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        self.give_grant(data.draw(st.sampled_from(list(self.attempts))))

    def give_grant(self, key: AttemptKey) -> None:
        a = self.attempts[key]
        a["granted"] = True
        dst = PeerRef("d", "d1", "", [f"tcp://{r}" for r in range(self.dst.world_size)])
        for sender in self.senders:
            sender.grant(Grant(key, dst, self.dst, [a["held"]], [pack_ids(list(range(a["blocks"])))]), self.now)

    def all_final(self, key: AttemptKey) -> None:
        a = self.attempts[key]
        for rank, final in enumerate(a["final"]):
            for layer in range(len(final)):
                final[layer] = a["blocks"]
                self.senders[rank].blocks_final(key, layer, a["blocks"], self.now)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), everything=st.booleans())
    def compute(self, data: st.DataObject, everything: bool) -> None:
        key = data.draw(st.sampled_from(list(self.attempts)))
        a = self.attempts[key]
        upto = a["blocks"] if everything else data.draw(st.integers(0, a["blocks"]))
        for rank, final in enumerate(a["final"]):
            layers = range(len(final)) if everything else [data.draw(st.integers(0, len(final) - 1))]
            for layer in layers:
                if upto >= final[layer]:
                    final[layer] = upto
                    self.senders[rank].blocks_final(key, layer, upto, self.now)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), source=st.booleans())
    def abort(self, data: st.DataObject, source: bool) -> None:
        key = data.draw(st.sampled_from(list(self.attempts)))
        if source:
            for sender in self.senders:
                sender.fail(key, TransferError("aborted"))
        else:
            for receiver in self.receivers:
                receiver.abort(key)

    @precondition(lambda self: self.batches or self.claims)
    @rule(data=st.data())
    def abort_under_a_copy(self, data: st.DataObject) -> None:
        if self.claims:
            rank, claim, *_ = data.draw(st.sampled_from(self.claims))
            self.receivers[rank].abort(claim.key)
        else:
            rank, batch = data.draw(st.sampled_from(self.batches))
            self.senders[rank].fail(batch.key, TransferError("aborted"))

    @rule(seconds=st.integers(0, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        for end in [*self.senders, *self.receivers]:
            end.expire(self.now)

    # ---------------------------------------------------------------- what the transports do

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), units=st.integers(1, 9), minimum=st.sampled_from([1, 1, 10**9]))
    def read(self, data: st.DataObject, units: int, minimum: int) -> None:
        key = data.draw(st.sampled_from(list(self.attempts)))
        for src_rank, shard in enumerate(self.src.shards()):
            max_bytes = units * self.src.layer_bytes_per_block(shard)
            for dst_rank in range(self.dst.world_size):
                batch = self.senders[src_rank].take(key, dst_rank, max_bytes=max_bytes, min_bytes=minimum, now=self.now)
                if batch is not None:
                    assert batch.size_bytes <= max_bytes
                    self.check_offer(src_rank, batch)
                    self.batches.append((src_rank, batch))

    def check_offer(self, src_rank: int, batch: Batch) -> None:
        a, shard = self.attempts[batch.key], self.src.shards()[src_rank]
        assert a["granted"]
        cells = [cell for s in batch.slices for cell in cells_of(s)]
        assert batch.size_bytes == self.bytes_of(cells)
        before = self.offered.setdefault((src_rank, batch.dst_rank, batch.key), set())
        assert len(set(cells)) == len(cells)
        assert not before & set(cells), "offered twice"
        before |= set(cells)
        for group, index, _, block in cells:
            layer = self.src.spec.groups[group].layers[index]
            assert a["held"] <= block < a["final"][src_rank][layer - shard.layer_lo], "held or not final"

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        src_rank, batch = self.batches.pop(data.draw(st.integers(0, len(self.batches) - 1)))
        header = self.senders[src_rank].state_of(batch).header(batch, "s1", "d1", 0)
        self.senders[src_rank].sent(batch, self.now)
        self.wire.append((header, batch))

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        header, batch = self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))
        receiver = self.receivers[header.dst_rank]
        try:
            claim = receiver.accept(header, batch.size_bytes)
        except CorruptSlice as error:
            raise AssertionError(f"a good message was called corrupt: {error}") from error
        except TransferError:
            for sender in self.senders:
                sender.fail(header.key, TransferError("refused"))
            return
        self.delivered.append((header, batch.size_bytes))
        self.claims.append((header.dst_rank, claim, header.src_rank, batch))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data(), how=st.sampled_from(["again", "attempt", "source", "destination", "rank", "hash", "size"]))
    def deliver_wrongly(self, data: st.DataObject, how: str) -> None:
        """A duplicate, a stale or a corrupt message never makes progress."""
        header, size = data.draw(st.sampled_from(self.delivered))
        live = self.is_live(header.dst_rank, header.key)
        changed = {
            "again": lambda: header,
            "attempt": lambda: dataclasses.replace(header, key=AttemptKey(header.key.request_id, 99)),
            "source": lambda: dataclasses.replace(header, src_incarnation="s0"),
            "destination": lambda: dataclasses.replace(header, dst_incarnation="d0"),
            "rank": lambda: dataclasses.replace(header, dst_rank=99),
            "hash": lambda: dataclasses.replace(header, block_hashes=bytes(len(header.block_hashes))),
            "size": lambda: header,
        }[how]()
        try:
            self.receivers[header.dst_rank].accept(changed, size - 1 if how == "size" else size)
        except CorruptSlice:
            assert live
            assert how in ("again", "hash", "size")
            self.failed.add((header.dst_rank, header.key))
        except TransferError:
            assert not live or how in ("attempt", "source", "destination", "rank")
        else:
            raise AssertionError(f"{how} was accepted")

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        rank, claim, src_rank, batch = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert ("d", rank, claim.key) not in self.released, "written after the release"
        cells = [cell for s in claim.slices for cell in cells_of(s)]
        done = self.placed.setdefault((rank, claim.key), set())
        assert not done & set(cells), "written twice"
        done |= set(cells)
        self.receivers[rank].placed(claim, self.now)
        self.senders[src_rank].acknowledged(batch, self.now)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), until=st.sampled_from(["read", "sent", "delivered", "written", "written"]))
    def advance(self, data: st.DataObject, until: str) -> None:
        """Let one attempt run to its end or to some phase before it, unless something stopped it earlier."""
        key = data.draw(st.sampled_from(list(self.attempts)))
        self.all_final(key)
        self.give_grant(key)
        for src_rank, sender in enumerate(self.senders):
            for dst_rank in range(self.dst.world_size):
                while batch := sender.take(key, dst_rank, max_bytes=2**20, now=self.now):
                    self.check_offer(src_rank, batch)
                    self.batches.append((src_rank, batch))
        while self.batches and until != "read":
            self.send(data)
        while self.wire and until in ("delivered", "written"):
            self.deliver(data)
        while self.claims and until == "written":
            self.write(data)

    # ---------------------------------------------------------------- what must always hold

    def is_live(self, rank: int, key: AttemptKey) -> bool:
        return key in self.receivers[rank]._live

    @invariant()
    def events_are_legal(self) -> None:
        for rank, sender in enumerate(getattr(self, "senders", [])):
            for event in sender.take_events():
                self.on_source_released(rank, event)
        for rank, receiver in enumerate(getattr(self, "receivers", [])):
            for event in receiver.take_events():
                if isinstance(event, DestinationReleased):
                    self.release("d", rank, event.key)
                    assert all((rank, event.key) != (r, c.key) for r, c, *_ in self.claims), "released under a write"
                elif isinstance(event, Received):
                    assert (rank, event.key) not in self.failed
                    assert self.placed.get((rank, event.key), set()) == self.wanted(rank, event.key)
                    self.received.add((rank, event.key))
                elif isinstance(event, ReceiveFailed):
                    assert (rank, event.key) not in self.received
                    self.failed.add((rank, event.key))

    def on_source_released(self, rank: int, event: SourceReleased) -> None:
        self.release("s", rank, event.key)
        assert all((rank, event.key) != (r, b.key) for r, b in self.batches), "released under a read"
        if event.error is None:
            sent = sum(self.bytes_of(c) for (r, _, k), c in self.offered.items() if (r, k) == (rank, event.key))
            assert event.bytes_sent == sent
            for (src_rank, dst_rank, key), offered in self.offered.items():
                if (src_rank, key) == (rank, event.key):
                    assert offered <= self.placed.get((dst_rank, key), set()), "released before the other end had it"

    def release(self, side: str, rank: int, key: AttemptKey) -> None:
        assert (side, rank, key) not in self.released, "released twice"
        assert (side, rank, key) in self.opened
        self.released[side, rank, key] = 1

    def bytes_of(self, cells: Iterable[Cell]) -> int:
        return sum(self.src.spec.unit_bytes[group] for group, *_ in cells)

    def wanted(self, rank: int, key: AttemptKey) -> set[Cell]:
        shard, a = self.dst.shards()[rank], self.attempts[key]
        return {
            (part.group, layer, head, block)
            for part in shard.parts
            for layer in range(part.layer_lo, part.layer_hi)
            for head in range(part.head_lo, part.head_hi)
            for block in range(a["held"], a["blocks"])
        }

    def teardown(self) -> None:
        """Left alone, everything ends: copies finish, the rest is aborted, each open has its release."""
        if not hasattr(self, "senders"):
            return
        for rank, batch in self.batches:
            self.senders[rank].sent(batch, self.now)
        for rank, claim, *_ in self.claims:
            self.receivers[rank].placed(claim, self.now)
        self.batches, self.claims = [], []
        for sender in self.senders:
            sender.fail_all(TransferError("closed"))
        for receiver in self.receivers:
            receiver.abort_all()
        self.placed = {}
        for side, rank, key in self.opened:
            end = self.senders[rank] if side == "s" else self.receivers[rank]
            events = [e for e in end._events if e.key == key and isinstance(e, (SourceReleased, DestinationReleased))]
            assert len(events) + self.released.get((side, rank, key), 0) == 1, (side, rank, key)


def cells_of(s: Any) -> list[Cell]:
    return [
        (s.group, layer, head, block)
        for layer in range(s.layer_lo, s.layer_hi)
        for head in range(s.head_lo, s.head_hi)
        for block in range(s.block_lo, s.block_hi)
    ]


TestRelay = Relay.TestCase
TestRelay.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_attempt_that_timed_out_with_a_batch_in_use_has_no_deadline_any_more() -> None:
    """Its I/O thread would poll without a pause until the batch completes, which it never does on a GPU that hangs."""
    kv = KVLayout("m", KVSpec.uniform(1, 1, 8, "float32", block_size=4))
    end, key = SendTable(kv, 0, NUM_BLOCKS), AttemptKey("r", 1)
    end.open(OpenSourceOrder(TransferPlan(key, [[0]], [0], [bytes(HASH_BYTES)], timeout_s=5.0), final_blocks=1))
    assert end.grant(Grant(key, PeerRef("d", "d1", "", ["a"]), kv, [0], [pack_ids([0])]), now=0.0) == [0]
    batch = end.take(key, 0, max_bytes=2**20, now=0.0)
    assert batch is not None
    assert end.next_deadline(0.0) == 5.0
    end.expire(6.0)
    assert end.ending == [key]
    assert end.next_deadline(6.0) is None
    end.sent(batch, 7.0)
    assert [type(event) for event in end.take_events()] == [SourceReleased]


def test_receiver_has_no_deadline_before_its_first_slice() -> None:
    """The sender may compute for longer than the timeout before the first block that the receiver lacks: behind a sliding
    window, or after a prefix that only the receiver has in its cache."""
    kv = KVLayout("m", KVSpec.uniform(1, 1, 8, "float32", block_size=4))
    sender, receiver = SendTable(kv, 0, NUM_BLOCKS), ReceiveTable(kv, 0, NUM_BLOCKS, "d1")
    key, ids, hashes = AttemptKey("r", 1), list(range(10)), [bytes([i]).ljust(HASH_BYTES) for i in range(10)]
    there = TransferPlan(key, [ids], [8], hashes, timeout_s=5.0)
    receiver.open(OpenDestinationOrder(there, PeerRef("p", "s1", "", []), kv), 0.0)
    assert receiver.take_events() == [Opened(key)]
    sender.open(OpenSourceOrder(TransferPlan(key, [ids], [0], hashes, timeout_s=5.0)))
    sender.grant(Grant(key, PeerRef("d", "d1", "", ["a"]), kv, [8], [pack_ids(ids)]), 0.0)

    now = 0.0
    for blocks in range(1, 10):
        now += 4.0
        for end in (sender, receiver):
            end.expire(now)
            assert end.take_events() == [], f"given up while the sender computes block {blocks}"
        sender.blocks_final(key, 0, blocks, now)
    batch = sender.take(key, 0, max_bytes=2**20, now=now)
    assert batch is not None
    header = sender.state_of(batch).header(batch, "s1", "d1", 1)
    receiver.placed(receiver.accept(header, batch.size_bytes), now)
    assert receiver.next_deadline() == now + 5.0
    receiver.expire(now + 6.0)
    assert [type(event) for event in receiver.take_events()] == [ReceiveFailed]


def test_attempt_that_waits_behind_another_one_of_the_same_node_has_no_deadline_while_that_one_moves() -> None:
    kv = KVLayout("m", KVSpec.uniform(1, 1, 8, "float32", block_size=4))
    receiver, ids, hashes = (
        ReceiveTable(kv, 0, NUM_BLOCKS, "d"),
        [0, 1, 2],
        [bytes([i]).ljust(HASH_BYTES) for i in range(3)],
    )
    keys = {name: AttemptKey(name, 1) for name in ("waits", "moves", "other node")}
    for name, key in keys.items():
        src = PeerRef("p", "s2" if name == "other node" else "s1", "", [])
        receiver.open(OpenDestinationOrder(TransferPlan(key, [ids], [0], hashes, timeout_s=5.0), src, kv), 0.0)
    receiver.take_events()

    def place(name: str, block: int, now: float) -> None:
        receiver.expire(now)
        moved, src = KVSlice(0, 0, 1, 0, 1, block, block + 1), "s2" if name == "other node" else "s1"
        header = SliceHeader(keys[name], src, "d", 0, 0, block, [moved], block, hashes[block])
        receiver.placed(receiver.accept(header, moved.size_bytes(kv.spec.unit_bytes)), now)

    place("waits", 0, 0.0)
    place("other node", 0, 0.0)
    place("moves", 0, 4.0)
    place("moves", 1, 8.0)
    place("waits", 1, 12.0)
    assert [(event.key, type(event)) for event in receiver.take_events()] == [(keys["other node"], ReceiveFailed)]
    receiver.expire(18.0)
    assert {event.key for event in receiver.take_events()} == {keys["waits"], keys["moves"]}


def test_stage_of_a_pipeline_has_no_deadline() -> None:
    """It gets nothing while the sender computes the layers of the other stages, each within the timeout."""
    spec = KVSpec.uniform(6, 1, 8, "float32", block_size=4)
    src, dst = KVLayout("m", spec), KVLayout("m", spec, pp_layers=(2, 4))
    sender, receivers = SendTable(src, 0, NUM_BLOCKS), [ReceiveTable(dst, r, NUM_BLOCKS, "d1") for r in range(2)]
    key, ids, hashes = AttemptKey("r", 1), [0, 1], [bytes([i]).ljust(HASH_BYTES) for i in range(2)]
    for receiver in receivers:
        plan = TransferPlan(key, [ids], [0], hashes, timeout_s=5.0)
        receiver.open(OpenDestinationOrder(plan, PeerRef("p", "s1", "", []), src), 0.0)
        receiver.take_events()
    sender.open(OpenSourceOrder(TransferPlan(key, [ids], [0], hashes, timeout_s=5.0)))
    sender.grant(Grant(key, PeerRef("d", "d1", "", ["a", "b"]), dst, [0], [pack_ids(ids)]), 0.0)

    now = 0.0
    for blocks in (1, 2):
        for layer in range(6):
            now += 4.0
            for end in (sender, *receivers):
                end.expire(now)
                assert end.take_events() == [], f"given up while layer {layer} is computed"
            sender.blocks_final(key, layer, blocks, now)
            stage = int(layer >= 2)
            batch = sender.take(key, stage, max_bytes=2**20, now=now)
            assert batch is not None
            header = sender.state_of(batch).header(batch, "s1", "d1", 1)
            sender.sent(batch, now)
            receivers[stage].placed(receivers[stage].accept(header, batch.size_bytes), now)
            sender.acknowledged(batch, now)
            if (layer, blocks) == (1, 2):
                assert [type(event) for event in receivers[0].take_events()] == [Received, DestinationReleased]
    assert [type(event) for event in receivers[1].take_events()] == [Received, DestinationReleased]
    assert [event.error for event in sender.take_events()] == [None]

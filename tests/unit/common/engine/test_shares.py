"""Tenants share a node's sequence slots and blocks: who has more than its share gives way, and nobody else."""

from __future__ import annotations

from collections import Counter

import pytest

from common.base.hashing import BLOCK_SIZE, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool


class Node:
    """A scheduler whose steps all draw the same token."""

    def __init__(
        self, num_slots: int = 8, num_blocks: int = 1000, *, depth: int = 1, num_microbatches: int = 1
    ) -> None:
        config = SchedulerConfig(5000, num_slots, 4096, 4096, depth=depth, num_microbatches=num_microbatches)
        self.scheduler = Scheduler(config, BlockPool(num_blocks))
        self.flying: list[ScheduledStep] = []
        self.count = 0

    def sequence(self, tenant: str, num_tokens: int = 5, max_tokens: int = 1000, priority: int = 0) -> Sequence:
        self.count += 1
        prompt = [self.count, *range(1, num_tokens)]
        params = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)
        request = EngineRequest(pack_ids(prompt), params, priority=priority, tenant=tenant)
        return Sequence(
            AttemptKey(f"{tenant}{self.count}", 1), request, list(prompt), root_hash("m"), float(self.count)
        )

    def add(self, tenant: str, count: int = 1, num_tokens: int = 5, max_tokens: int = 1000, priority: int = 0) -> None:
        for _ in range(count):
            self.scheduler.add(self.sequence(tenant, num_tokens, max_tokens, priority))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            while (scheduled := self.scheduler.schedule()) is not None:
                self.flying.append(scheduled)
            if self.flying:
                scheduled = self.flying.pop(0)
                self.scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])
            self.scheduler.check_integrity()

    def running(self) -> Counter[str]:
        return Counter(seq.request.tenant for seq in self.scheduler.running.values())


@pytest.mark.parametrize(("depth", "num_microbatches"), [(1, 1), (2, 1), (1, 3)])
def test_a_tenant_that_has_every_slot_gives_up_half_of_them_and_no_more(depth: int, num_microbatches: int) -> None:
    node = Node(depth=depth, num_microbatches=num_microbatches)
    node.add("hog", 20)
    node.step(3)
    assert node.running() == {"hog": 8}
    node.add("other", 20)
    node.step(3)
    assert node.running()["other"] > 0
    node.step(60)
    assert node.running() == {"hog": 4, "other": 4}
    assert node.scheduler.num_preemptions == 4, "nothing is preempted back and forth"
    node.add("third", 20)
    node.step(60)
    assert sorted(node.running().values()) == [2, 3, 3]


def test_short_requests_get_in_at_once_beside_a_tenant_with_every_slot() -> None:
    node = Node()
    node.add("hog", 20)
    node.step(2)
    for _ in range(10):
        node.add("other", max_tokens=5)
        node.step(6)
        assert not any(seq.request.tenant == "other" for seq in node.scheduler.waiting)
        assert node.running()["other"] == 0, "it has ended"
    node.step()
    assert node.running() == {"hog": 8}, "what others do not need goes back"


def test_who_has_more_running_gets_no_further_slot_while_others_wait() -> None:
    node = Node(num_slots=4)
    node.add("hog", 4, max_tokens=10)
    node.step(8)
    node.add("hog", 8)
    node.add("other", 8)
    node.step(20)
    assert node.running() == {"hog": 2, "other": 2}


def test_nobody_is_preempted_for_a_less_urgent_request_nor_among_equals() -> None:
    node = Node(num_slots=4)
    node.add("hog", 4)
    node.step(2)
    node.add("other", 2, priority=1)
    node.step(5)
    assert node.running() == {"hog": 4}
    node = Node(num_slots=4)
    for tenant in "abcd":
        node.add(tenant)
    node.step(2)
    node.add("e")
    node.step(5)
    assert node.scheduler.num_preemptions == 0


def test_one_tenant_is_never_preempted_for_itself() -> None:
    node = Node()
    node.add("hog", 40)
    node.step(30)
    assert node.scheduler.num_preemptions == 0


def test_blocks_are_shared_too() -> None:
    node = Node(num_slots=64, num_blocks=70)
    node.add("hog", 3, num_tokens=20 * BLOCK_SIZE)
    node.step(2)
    node.add("other", num_tokens=12 * BLOCK_SIZE, max_tokens=3)
    node.step()
    assert node.running() == {"hog": 2, "other": 1}
    node.step(5)
    assert node.running() == {"hog": 3}


def test_a_tenant_with_one_long_sequence_keeps_it() -> None:
    node = Node(num_slots=64, num_blocks=64)
    node.add("hog", num_tokens=60 * BLOCK_SIZE)
    node.step(2)
    node.add("other", num_tokens=12 * BLOCK_SIZE)
    node.step(5)
    assert node.running() == {"hog": 1}


def test_prompts_of_another_tenant_are_not_behind_all_begun_ones() -> None:
    node = Node(num_slots=16)
    node.scheduler.config = SchedulerConfig(5000, 16, 64, 64)
    node.add("hog", 10, num_tokens=60)
    node.step()
    node.add("other", num_tokens=60)
    node.step(2)
    assert any(seq.tokens.num_generated for seq in node.scheduler.running.values() if seq.request.tenant == "other")


def test_a_tenants_turn_takes_blocks_of_one_data_parallel_rank_and_no_others() -> None:
    """The sequences that give way are on both ranks in turn; blocks of the other rank would not help the one that waits."""
    node = Node(num_slots=20)
    node.scheduler = Scheduler(SchedulerConfig(5000, 20, 4096, 4096), BlockPool(32, num_homes=2))
    node.add("hog", 8, num_tokens=3 * BLOCK_SIZE)
    node.step(2)
    running = list(node.scheduler.running.values())
    assert [seq.blocks.home for seq in running] == [0, 1] * 4
    node.add("other", num_tokens=4 * BLOCK_SIZE)
    node.step(2)
    assert node.running()["other"] == 1
    assert len({seq.blocks.home for seq in running if seq.preemptions}) == 1

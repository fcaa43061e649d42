"""Received KV that only the first rank of a stage has: how much a step hands on, and when its sequence joins."""

from __future__ import annotations

import pytest
from support.node_pair import KEY, PROMPT, Pair

from common.control.messages import AttemptKey
from common.engine.step import HandedOn, StepInput, StepOutput
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from decode_node import node
from decode_node.hand_on_queue import HandOnQueue, received_once
from decode_node.node import Phase

FIRST, SECOND = AttemptKey("first", 1), AttemptKey("second", 1)


def test_a_step_hands_on_so_many_blocks_the_oldest_first() -> None:
    waiting = HandOnQueue()
    waiting.add(FIRST, [HandedOn(0, [1, 2, 3]), HandedOn(2, [4])])
    waiting.add(SECOND, [HandedOn(0, [5, 6])])
    assert waiting.take(2) == ([HandedOn(0, [1, 2])], [])
    assert FIRST in waiting
    assert waiting.take(3) == ([HandedOn(0, [3]), HandedOn(2, [4]), HandedOn(0, [5])], [FIRST])
    assert FIRST not in waiting
    assert waiting.take(None) == ([HandedOn(0, [6])], [SECOND])
    assert not waiting


def test_an_attempt_that_ended_hands_nothing_on_and_one_without_such_kv_does_not_wait() -> None:
    waiting = HandOnQueue()
    waiting.add(FIRST, [HandedOn(0, [1])])
    waiting.drop(FIRST)
    waiting.drop(SECOND)
    waiting.add(SECOND, [HandedOn(0, [])])
    assert not waiting
    assert waiting.take(None) == ([], [])


def test_only_groups_that_travel_once_are_handed_on() -> None:
    latents = LayerGroup((0,), (KVPlane("latent", 16),), 1, "float32")
    layout = KVLayout("m", KVSpec((latents,)), tp_size=2, hands_on=True)
    assert received_once(layout, layout, [[7, 8]]) == [HandedOn(0, [7, 8])]
    assert received_once(layout, KVLayout("m", KVSpec((latents,))), [[7, 8]]) == []


def test_a_sequence_joins_with_the_step_that_hands_on_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream runs, so that the other's blocks go with several of its steps."""
    monkeypatch.setattr(node, "MOST_BLOCKS", 1)
    pair = Pair(d_blocks=64)
    steps: list[StepInput] = []
    execute = pair.d_runner.execute

    def recorded(step: StepInput, on_layer: None = None) -> StepOutput:
        steps.append(step)
        return execute(step, on_layer)

    monkeypatch.setattr(pair.d_runner, "execute", recorded)
    pair.request(max_tokens=40)
    while pair.d.attempts[KEY].phase is not Phase.ACTIVE:
        pair.run(1)
    monkeypatch.setattr(node, "received_once", lambda layout, src, blocks: [HandedOn(0, blocks[0])])
    pair.request(SECOND, [7, *PROMPT], max_tokens=5)
    while pair.d.attempts[SECOND].phase is not Phase.ACTIVE:
        pair.run(1)
    pair.run()
    handed = [(len(blocks), len(step.query_lens)) for step in steps for _, blocks in step.handed_on]
    assert handed == [(1, 1), (1, 1), (1, 2)], "one block beside the stream, the last one with both sequences"
    assert len(pair.tokens(SECOND)) == 5
    pair.assert_whole()

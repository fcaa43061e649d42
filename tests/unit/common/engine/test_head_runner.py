"""Which hidden row each position of a draft head reads."""

from __future__ import annotations

from common.engine.head_runner import slots_before
from common.engine.step import StepInput


def test_each_row_reads_the_slot_of_the_position_before_it_in_its_own_sequence() -> None:
    tables = [[7, 2, 5], [9, 4], [3]]
    parts = [range(31, 34), range(16, 17), range(3)]
    slots = [[tables[i][p // 16] * 16 + p % 16 for p in part] for i, part in enumerate(parts)]
    step = StepInput(
        step_id=1,
        token_ids=[0] * 7,
        positions=[p for part in parts for p in part],
        slot_mapping=[[slot for own in slots for slot in own]],
        query_lens=[len(part) for part in parts],
        context_lens=[part.stop for part in parts],
        block_tables=[tables],
    )
    first_of_all = 3 * 16
    assert slots_before(step, 16) == [2 * 16 + 14, 2 * 16 + 15, 5 * 16, 9 * 16 + 15, first_of_all, 48, 49]

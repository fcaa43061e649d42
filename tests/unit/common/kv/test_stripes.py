"""Which blocks and tokens of a sequence each of N ranks holds."""

from __future__ import annotations

import numpy as np
import pytest

from common.attention.striped import count_tokens
from common.base.errors import ConfigError
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.stripes import Stripe

STRIPES = [Stripe(first, step) for step in (1, 2, 3, 4, 6) for first in range(step)]


@pytest.mark.parametrize("stripe", STRIPES, ids=str)
def test_blocks_and_tokens_are_counted_as_one_by_one(stripe: Stripe) -> None:
    for count in range(15):
        own = [i for i in range(count) if stripe.owns(i)]
        assert stripe.count(count) == len(own)
        assert list(range(count))[stripe.indices] == own
    counts = count_tokens(np.arange(40), stripe, 4).tolist()
    assert counts == [sum(stripe.owns(token // 4) for token in range(tokens)) for tokens in range(40)]


def test_the_overlap_of_two_stripes_is_what_both_hold() -> None:
    for one in STRIPES:
        for other in STRIPES:
            both = [i for i in range(50) if one.owns(i) and other.owns(i)]
            overlap = one.overlap(other)
            assert ([] if overlap is None else list(range(50))[overlap.indices]) == both


def test_every_rank_of_a_node_has_its_layers_heads_and_stripe() -> None:
    layout = KVLayout("m", KVSpec.uniform(4, 4, 8, "float32"), tp_size=2, pp_layers=(3, 1), cp_size=3)
    assert layout.world_size == 12
    shards = layout.shards()
    assert len({(s.tp_rank, s.pp_rank, s.stripe) for s in shards}) == 12
    assert [(s.tp_rank, s.stripe.first, s.pp_rank) for s in shards[:7]] == [
        *((tp, cp, 0) for cp in range(3) for tp in range(2)),
        (0, 0, 1),
    ]
    assert layout.pool_blocks(100) == 300


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_size_that_makes_no_sense_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"context-parallel size {size} is not from 1 to 64"):
        KVLayout("m", KVSpec.uniform(1, 1, 1, "float32"), cp_size=size)

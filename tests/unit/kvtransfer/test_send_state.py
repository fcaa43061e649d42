"""How long a sender holds slices back."""

from __future__ import annotations

import pytest

from common.base.hashing import HASH_BYTES
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import OpenSourceOrder, TransferPlan
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from kvtransfer.send_state import SendState

KEY = AttemptKey("r", 1)


@pytest.mark.parametrize(("timeout_s", "held_s"), [(4.0, 1.0), (600.0, 5.0)])
def test_slices_are_held_back_for_a_few_seconds_at_most(timeout_s: float, held_s: float) -> None:
    """A receiver with a far shorter timeout than the sender's must not end the transfer meanwhile."""
    layout = KVLayout("m", KVSpec.uniform(2, 2, 16, "float32"))
    hashes = [bytes([i]) * HASH_BYTES for i in range(4)]
    plan = TransferPlan(KEY, [[0, 1, 2, 3]], [0], hashes, timeout_s)
    outgoing = SendState(OpenSourceOrder(plan), layout, 0, 8)
    outgoing.grant(Grant(KEY, PeerRef("d", "d1", "", ["0"]), layout, [0], [pack_ids([4, 5, 6, 7])]), 0.0)
    outgoing.blocks_final(0, 1, 0.0)
    assert outgoing.overdue_next(0.0) == held_s
    assert outgoing.take(0, max_bytes=10**6, min_bytes=10**6, now=held_s - 0.1) is None
    assert outgoing.overdue(held_s) == [0]
    assert outgoing.take(0, max_bytes=10**6, min_bytes=10**6, now=held_s) is not None

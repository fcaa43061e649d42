"""When a transfer end reports what its orders lead to."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.loopback_transport import LoopbackNetwork, loopback_receiver
from support.transfer_harness import DEADLINE_S, layout

from common.control.messages import AttemptKey, PeerRef
from common.engine.kv_transfer import AbortOrder, OpenDestinationOrder, Opened, TransferEvent, TransferPlan
from common.kv.storage import KVStorage
from kvtransfer.receive_half import ReceiveHalf

KEY = AttemptKey("r", 1)


@pytest.mark.parametrize("while_messages_are_taken", [False, True])
def test_opened_is_reported_before_the_next_message_is_copied(
    monkeypatch: pytest.MonkeyPatch, while_messages_are_taken: bool
) -> None:
    """The grant waits for the report of every rank; copies of other transfers may take long."""
    kv = layout()
    events: list[TransferEvent] = []
    reported: list[list[TransferEvent]] = []
    taken = threading.Event()
    order = OpenDestinationOrder(TransferPlan(KEY, [[1]], [0], [bytes(16)], 60.0), PeerRef("p", "src-1", "", []), kv)

    def take_messages(half: Any, *_: Any, **__: Any) -> None:
        if not taken.is_set():
            if while_messages_are_taken:
                end.apply(order)
                half._run_commands()
            reported.append(list(events))
            taken.set()

    monkeypatch.setattr(ReceiveHalf, "take_messages", take_messages)
    end = loopback_receiver(KVStorage(kv, kv.rank_shard(0), 4), kv, 0, events.append, LoopbackNetwork())
    try:
        end.apply(AbortOrder(KEY) if while_messages_are_taken else order)
        assert taken.wait(DEADLINE_S)
    finally:
        end.close()
    assert reported == [[Opened(KEY)]]

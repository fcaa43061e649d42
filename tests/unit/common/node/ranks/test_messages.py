"""Messages between a leader and its ranks: what is encoded is decoded as the same typed message, errors included."""

from __future__ import annotations

import pytest

from common.base.errors import CorruptSlice, TransferError
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    GrantOrder,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    Traffic,
    TransferPlan,
)
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.node.ranks.messages import RankBeat, RankBusy, RankCodec, RankOrder, RankReport

KEY = AttemptKey("r", 1)
LAYOUT = KVLayout("f", KVSpec.uniform(1, 1, 1, "float32"))
PEER = PeerRef("d", "d1", "tcp://d", ["zmq+tcp://d-data"])
TRAFFIC = (Traffic(1, 0, "zmq", "the only one", 7),)


@pytest.mark.parametrize(
    "message",
    [
        RankBeat(3, RankBusy(up_s=12.5, busy_s=11.25)),
        OpenSourceOrder(TransferPlan(KEY, [[3, 4]], [0], [b"h" * 16] * 2, 60.0), final_blocks=1),
        OpenDestinationOrder(TransferPlan(KEY, [[5, 6]], [1], [b"h" * 16] * 2, 60.0), PEER, LAYOUT),
        GrantOrder(Grant(KEY, PEER, LAYOUT, [0], [pack_ids([5, 6])])),
        AbortOrder(KEY),
        DisconnectOrder("d1"),
        SourceReleased(KEY, 7, traffic=TRAFFIC),
        Opened(KEY),
        Received(KEY, 7, TRAFFIC),
        DestinationReleased(KEY),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_arrives_as_it_was_sent(message: RankReport | RankOrder) -> None:
    codec = RankCodec()
    assert codec.decode(codec.encode(message)) == message


def test_error_of_a_transfer_arrives_with_its_type_and_message() -> None:
    codec = RankCodec()
    failed = codec.decode(codec.encode(ReceiveFailed(KEY, CorruptSlice("hash differs"))))
    assert isinstance(failed, ReceiveFailed)
    assert (failed.key, type(failed.error), str(failed.error)) == (KEY, CorruptSlice, "hash differs")
    released = codec.decode(codec.encode(SourceReleased(KEY, 7, OSError("no route"), TRAFFIC)))
    assert isinstance(released, SourceReleased)
    assert (released.bytes_sent, released.traffic) == (7, TRAFFIC)
    assert (type(released.error), str(released.error)) == (TransferError, "no route")

"""Traffic reports of a node: bytes by pair of ranks, transport and reason."""

from __future__ import annotations

from support import transports
from support.transfer_harness import Cluster, layout

from common.engine.kv_transfer import Received, SourceReleased


def test_both_ends_report_the_bytes_of_every_pair() -> None:
    cluster = Cluster(transports.loopback(), layout(tp=2), layout(tp=1, pp=(3, 1)))
    try:
        transfer = cluster.transfer(tokens=16)
        transfer.run()
        sent = [t for rank in cluster.senders for t in rank.recorder.wait(transfer.key, SourceReleased).traffic]
        received = [t for rank in cluster.receivers for t in rank.recorder.wait(transfer.key, Received).traffic]
    finally:
        cluster.close()
    layer_bytes = cluster.dst_layout.spec.bytes_per_block * 4 // 4 // 2
    expected = {(0, 0): 3 * layer_bytes, (0, 1): layer_bytes, (1, 0): 3 * layer_bytes, (1, 1): layer_bytes}
    assert {(t.rank, t.peer_rank): t.size_bytes for t in sent} == expected
    assert {(t.peer_rank, t.rank): t.size_bytes for t in received} == expected
    assert all(t.transport == "loopback" and t.why for t in sent)

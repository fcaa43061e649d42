"""How the GPUs of a machine are found and assigned to nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.up.gpus import share_gpus, visible_gpus


def test_gpus_are_those_that_cuda_would_see() -> None:
    files = ["null", "nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm"]
    assert visible_gpus(None, files) == ["0", "1"]
    assert visible_gpus("1", files) == ["1"]
    assert visible_gpus("GPU-8f2, 0,-1,1", files) == ["GPU-8f2", "0"]
    assert visible_gpus("", files) == visible_gpus("-1", files) == visible_gpus("0", ["null"]) == []


@given(st.integers(1, 8), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_every_rank_of_a_node_has_a_gpu_of_its_own_and_no_gpu_is_promised_twice(gpus: int, ranks: list[int]) -> None:
    shares = share_gpus([str(i) for i in range(gpus)], ranks)
    promised = dict.fromkeys(range(gpus), 0.0)
    for count, share in zip(ranks, shares, strict=True):
        assert share is not None
        assert len(set(share.visible)) == len(share.visible) == min(count, gpus)
        for gpu in share.visible:
            promised[int(gpu)] += share.utilization
    assert max(promised.values()) <= 0.901


def test_the_share_of_all_nodes_on_a_gpu_is_divided_among_them() -> None:
    assert [each and each.utilization for each in share_gpus(["0"], [1, 1], 0.8)] == [0.4, 0.4]
    assert [each and each.utilization for each in share_gpus(["0", "1"], [1, 1], 0.8)] == [0.8, 0.8]

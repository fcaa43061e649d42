"""Layer groups: each has KV memory and a backend of its own, and a layer's attention goes to the backend of its group."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import reference

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.grouped import GroupedAttention, attention_of_groups
from common.base.errors import HandshakeRefused
from common.kv.rank_layout import KVLayout, check_compatible
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage

PLANES = KVPlane("k", 16), KVPlane("v", 16)
SPEC = KVSpec((LayerGroup((0, 2, 3), PLANES, 2, "float32", 32), LayerGroup((1,), PLANES, 2, "float32")))
LAYOUT = KVLayout("f", SPEC, pp_layers=(2, 2))
SHAPE = AttentionShape(4, 2, 16, torch.float32, 16)


def make(layout: KVLayout, stage: int) -> tuple[KVStorage, GroupedAttention | CpuAttention]:
    storage = KVStorage(layout, layout.shard(0, stage), 4)
    backend = attention_of_groups(storage, SHAPE, CpuAttention)
    assert isinstance(backend, GroupedAttention | CpuAttention)
    return storage, backend


def test_each_layer_attends_in_the_memory_of_its_group() -> None:
    storage, attention = make(KVLayout("f", SPEC), 0)
    assert isinstance(attention, GroupedAttention)
    for backend in (attention, attention.for_graph(3)):
        backend.plan(AttentionMetadata([3], [3], [[2]], torch.tensor([32, 33, 34])))
        for layer, (group, index) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2)]):
            q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
            out = backend.forward(layer, q, k, v)
            torch.testing.assert_close(out.double(), reference(q, k, v, 0), atol=2e-5, rtol=1e-5)
            kept = storage.groups[group].stacked[index, :, 2].transpose(1, 2)[:, :3]
            assert torch.equal(kept, torch.stack((k, v)))
        assert [backend.of_layer(layer)[1] for layer in range(4)] == [0, 0, 1, 2]


def test_a_stage_without_layers_of_a_group_has_no_backend_for_it() -> None:
    assert isinstance(make(LAYOUT, 0)[1], GroupedAttention)
    assert isinstance(make(LAYOUT, 1)[1], CpuAttention)
    assert LAYOUT.group_layers(LAYOUT.shard(0, 1)) == [[0, 1], []]


def test_nodes_whose_windows_differ_refuse_each_other() -> None:
    windows = [KVSpec((LayerGroup((0,), PLANES, 2, "float32", window),)) for window in (32, None)]
    src, dst = (KVLayout("f", spec) for spec in windows)
    assert src.kv_kind != dst.kv_kind
    with pytest.raises(HandshakeRefused, match="sliding window differs: prefill node has 32, decode node has None"):
        check_compatible(src, dst)

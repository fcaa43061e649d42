"""Layer groups: each has KV memory and a backend of its own, and a layer's attention goes to the backend of its group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_cases import reference

from common.attention.base import AttentionMetadata, AttentionShape
from common.attention.cpu import CpuAttention
from common.attention.grouped import GroupedAttention, attention_of_groups, backend_of
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
    windows = {number: group.window for group in SPEC.groups for number in group.layers}
    own = range(storage.shard.layer_lo, storage.shard.layer_hi)
    backend = attention_of_groups(storage, [replace(SHAPE, window=windows[number]) for number in own], CpuAttention)
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
        assert [backend.of_layer[layer][1] for layer in range(4)] == [0, 0, 1, 2]


def test_layers_of_one_group_that_compute_differently_have_backends_of_their_own_over_one_memory() -> None:
    layout = KVLayout("f", KVSpec.uniform(3, 2, 16, "float32"))
    storage = KVStorage(layout, layout.shard(0, 0), 4)
    capped = replace(SHAPE, soft_cap=2.0, scale=3.0)
    attention = attention_of_groups(storage, [SHAPE, capped, SHAPE], CpuAttention)
    assert isinstance(attention, GroupedAttention)
    assert [backend_of(attention, layer)[1] for layer in range(3)] == [0, 1, 2]
    assert backend_of(attention, 0)[0] is backend_of(attention, 2)[0] is not backend_of(attention, 1)[0]
    attention.plan(AttentionMetadata([3], [3], [[2]], torch.tensor([32, 33, 34])))
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    outs = [attention.forward(layer, q, k, v) for layer in range(3)]
    assert torch.equal(outs[0], outs[2])
    alone = CpuAttention(storage.groups[0], capped)
    alone.plan(AttentionMetadata([3], [3], [[2]], torch.tensor([32, 33, 34])))
    assert torch.equal(outs[1], alone.forward(1, q, k, v))
    assert not torch.equal(outs[0], outs[1])
    assert [
        torch.equal(kept[:, 2].transpose(1, 2)[:, :3], torch.stack((k, v))) for kept in storage.groups[0].stacked
    ] == [True] * 3


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

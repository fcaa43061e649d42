"""What the rest of the suite takes for granted of the GPU."""

from __future__ import annotations

import pytest
import torch

from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage


def test_the_gpu_multiplies_bf16_and_keeps_float8() -> None:
    a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    torch.testing.assert_close((a.bfloat16() @ b.bfloat16()).double(), exact, atol=1.0, rtol=0.02)
    assert torch.equal(a.to(torch.float8_e4m3fn).cpu().float(), a.cpu().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_blocks_are_copied_as_on_a_cpu(dtype: str) -> None:
    layout = KVLayout("m", KVSpec.uniform(3, 2, 64, dtype))
    storages = [KVStorage(layout, layout.shard(0, 0), 8, device) for device in ("cpu", "cuda")]
    content = torch.randint(0, 120, storages[0].data.shape, dtype=torch.uint8)
    for storage in storages:
        storage.data.copy_(content)
        sources, targets = (torch.tensor(blocks, device=storage.data.device) for blocks in ([1, 1, 5], [0, 7, 2]))
        storage.copy_blocks(0, sources, targets)
    assert torch.equal(storages[0].data, storages[1].data.cpu())

"""flashinfer's real Python wrappers around fake kernels on a CPU: tests that the wrappers accept our calls and buffers.

    FLASHINFER_CUDA_ARCH_LIST=9.0a PYTHONPATH=FOLDER-WITH-FLASHINFER:.:tests python tests/support/flashinfer_wrappers.py

Run by hand where the package is installed (0.6 and 0.7 import without a GPU); docs/gpu.md names the tested releases.
Only private parts of flashinfer that cannot run here are replaced: the compiled modules and pinned memory.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from support import fake_flashinfer
from support.attention_cases import LENS, Case
from torch import Tensor

from common.attention.flashinfer import FlashInferAttention

_NON_CAUSAL, _CAUSAL, _HND = 0, 1, 1
_TOLERANCE = 5e-2


def main() -> None:
    flashinfer = importlib.import_module("flashinfer")
    modules: set[tuple[object, ...]] = set()
    _replace_what_needs_a_gpu(modules)
    make_backend = partial(FlashInferAttention, flashinfer=flashinfer)
    compared = 0
    for lens in LENS.values():
        for dtype, query_dtype in (
            ("float16", torch.float16),
            ("bfloat16", torch.bfloat16),
            ("float8_e4m3", torch.bfloat16),
        ):
            scales = ((1.0, 1.0), (0.5, 2.0)) if dtype == "float8_e4m3" else ()
            compared += _check(Case(make_backend, (14, 2, 64), lens, dtype, scales, query_dtype))
    recorded = Case(make_backend, (14, 2, 64), LENS["decode over block borders"], "bfloat16", (), torch.bfloat16)
    recorded.backend = recorded.backend.for_graph(4)
    compared += _check(recorded) + _check(recorded)
    print(f"flashinfer {flashinfer.__version__}: {compared} results as expected; modules asked for:")
    print(*sorted(map(str, modules)), sep="\n")


def _check(case: Case) -> int:
    results = case.run(layer=1)
    for i, out in enumerate(results):
        torch.testing.assert_close(out.double(), case.expected(i), atol=_TOLERANCE, rtol=_TOLERANCE)
    return len(results)


def _replace_what_needs_a_gpu(modules: set[tuple[object, ...]]) -> None:
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    def module(*key: object) -> SimpleNamespace:
        modules.add(key)
        return SimpleNamespace(plan=lambda *args: ["planned"], paged_run=_paged_run)

    torch.empty = unpinned
    for name in ("prefill", "decode"):
        part: Any = importlib.import_module(f"flashinfer.{name}")
        part.get_batch_prefill_module = module
        part.device_support_pdl = lambda device: False
    page: Any = importlib.import_module("flashinfer.page")
    page._append_paged_kv_cache_kernel = _append


def _append(
    k: Tensor, v: Tensor, sequences: Tensor, positions: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> None:
    indices, indptr, last_page_len, layout = rest
    assert layout == _HND
    fake_flashinfer.append_paged_kv_cache(
        k, v, sequences, positions, (keys, values), indices, indptr, last_page_len, "HND"
    )


def _paged_run(*args: Any) -> None:
    """The arguments of the compiled function, alike for prompts and for decode rows on tensor cores."""
    q, keys, values, qo_indptr, indptr, indices, last_page_len, out = args[3:11]
    mask, layout, scale = args[12], args[13], args[23]
    assert layout == _HND
    group, page_size = q.size(1) // keys.size(1), keys.size(2)
    for i, last in enumerate(last_page_len.tolist()):
        pages = indices[indptr[i] : indptr[i + 1]].long()
        length = (pages.numel() - 1) * page_size + last
        k, v = (
            side.view(torch.int8 if side.element_size() == 1 else torch.int16)[pages].view(side.dtype).float()
            for side in (keys, values)
        )
        k, v = (side.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0) for side in (k, v))
        rows = q[qo_indptr[i] : qo_indptr[i + 1]].float().transpose(0, 1)
        scores = rows @ k.transpose(1, 2) * scale
        if mask == _CAUSAL:
            future = torch.ones(rows.size(1), length, dtype=torch.bool).triu_(1 + length - rows.size(1))
            scores.masked_fill_(future, -math.inf)
        else:
            assert (mask, rows.size(1)) == (_NON_CAUSAL, 1)
        out[qo_indptr[i] : qo_indptr[i + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)


if __name__ == "__main__":
    main()

"""FP8 KV: what e4m3 keeps of a value, the storage's scales, and attention over them."""

from __future__ import annotations

import math

import pytest
import torch
from support.kv_words import kv_words
from support.runner_cases import make_runner
from tokenizers import Tokenizer
from torch import Tensor

from common.attention.base import AttentionMetadata
from common.base.errors import ConfigError, HandshakeRefused
from common.kernels.float8 import E4M3, E4M3_MAX, narrow, widen, words_of
from common.kv.rank_layout import KVLayout, blocks_for, check_compatible
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage
from common.model.hub import DEMO_MODEL_PATH
from common.model.rank_model import HIDDEN
from scripts.demo_model.samples import SAMPLES, prompt_text


def test_every_byte_widens_to_what_pytorch_makes_of_it() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(E4M3).view(16, 16)
    widened = widen(stored)
    assert torch.equal(widened.isnan(), stored.float().isnan())
    assert torch.equal(widened.nan_to_num(), stored.float().nan_to_num())


@pytest.mark.parametrize("scale", [1.0, 0.02, 3.0])
def test_a_value_is_kept_to_a_sixteenth_of_itself(scale: float) -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 20 * scale
    kept = widen(narrow(values, E4M3, scale)) * scale
    error = (kept - values).abs()
    assert bool((error <= torch.maximum(values.abs() / 16, torch.tensor(2.0**-10 * scale))).all())


def test_what_is_too_large_is_cut_off_and_what_is_no_number_stays_none() -> None:
    values = torch.tensor([449.0, 1e9, -1e9, math.inf, -math.inf, math.nan])
    kept = widen(narrow(values, E4M3, 1.0))
    assert kept[:5].tolist() == [E4M3_MAX, E4M3_MAX, -E4M3_MAX, E4M3_MAX, -E4M3_MAX]
    assert math.isnan(kept[5])


def test_other_dtypes_are_left_alone() -> None:
    values = torch.randn(8)
    assert widen(values) is values
    assert torch.equal(narrow(values, torch.bfloat16, 1.0), values.bfloat16())
    assert words_of(values) is values


def test_storage_takes_half_the_bytes_of_bf16_and_knows_its_scales() -> None:
    layouts = [KVLayout("f", KVSpec.uniform(3, 2, 16, dtype)) for dtype in ("bfloat16", "float8_e4m3")]
    assert layouts[0].spec.bytes_per_block == 2 * layouts[1].spec.bytes_per_block
    storage = KVStorage(layouts[1], layouts[1].shard(0, 0), 5, scales=[((0.5, 2.0), (1.0, 1.0), (0.25, 1.0))])
    assert storage.data.nbytes == 5 * layouts[1].spec.bytes_per_block
    assert kv_words(storage).nbytes == storage.data.nbytes
    assert storage.groups[0].scales[0] == (0.5, 2.0)
    plain = KVStorage(layouts[0], layouts[0].shard(0, 0), 5, scales=[((0.5, 2.0),) * 3])
    assert plain.groups[0].scales == ((1.0, 1.0),) * 3


def test_scales_belong_to_fp8_and_are_one_pair_for_each_layer() -> None:
    layout = KVLayout("f", KVSpec.uniform(2, 2, 16, "float8_e4m3"))
    with pytest.raises(ConfigError, match="1 sets of KV scales for 2 layers of 2 planes"):
        KVStorage(layout, layout.shard(0, 0), 5, scales=[((1.0, 1.0),)])
    with pytest.raises(ConfigError, match="must be positive"):
        KVStorage(layout, layout.shard(0, 0), 5, scales=[((1.0, 1.0), (0.0, 1.0))])


def test_nodes_that_keep_kv_in_other_types_refuse_each_other_naming_both() -> None:
    with pytest.raises(
        HandshakeRefused, match="dtype differs: prefill node has 'bfloat16', decode node has 'float8_e4m3'"
    ):
        check_compatible(
            KVLayout("f", KVSpec.uniform(2, 2, 16, "bfloat16")), KVLayout("f", KVSpec.uniform(2, 2, 16, "float8_e4m3"))
        )


def log_probabilities(kv_dtype: str, tokens: list[int], chunk: int) -> Tensor:
    """[len(tokens) - 1, vocab] of what follows each of `tokens`, by the demo model in float32, `chunk` at a time."""
    runner = make_runner(DEMO_MODEL_PATH, "float32", kv_dtype)
    model, attention = runner._model, runner._attention  # pyright: ignore
    blocks = list(range(blocks_for(len(tokens))))
    rows: list[Tensor] = []
    for lo in range(0, len(tokens) - 1, chunk):
        hi = min(lo + chunk, len(tokens) - 1)
        attention.plan(AttentionMetadata([hi - lo], [hi], [blocks], torch.arange(lo, hi)))
        logits = model.logits(model.forward(torch.tensor(tokens[lo:hi]), torch.arange(lo, hi), attention)[HIDDEN])
        assert logits is not None
        rows.append(logits.log_softmax(-1))
    return torch.cat(rows)


MEAN, PERCENTILE_99 = 0.08, 0.6
"""What e4m3 KV may change log-probabilities by. Seen: 0.047 and 0.43, where bfloat16 KV changes them by 0.003 and 0.029."""


@pytest.mark.parametrize("chunk", [16, 1])
def test_log_probabilities_of_a_trained_model_stay_near_those_with_float32_kv(chunk: int) -> None:
    """Of the tokens that get 1 % and more, over text of the kind that the model has learned."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_PATH / "tokenizer.json"))
    # Lists of tools are in prompts only: the model has never learned to predict them.
    text = "".join(prompt_text(sample) + sample.expected for sample in SAMPLES if not sample.tools)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    exact, kept = (log_probabilities(dtype, tokens, chunk) for dtype in ("float32", "float8_e4m3"))
    errors = (exact - kept).abs()[exact > math.log(0.01)]
    print(f"mean {errors.mean():.4f}, 99th percentile {errors.quantile(0.99):.4f}")
    assert 0 < errors.mean() < MEAN
    assert errors.quantile(0.99) < PERCENTILE_99

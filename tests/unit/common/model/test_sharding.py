"""Which rank holds what: every part covered once, in agreement with the KV layout, and clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.base.errors import ConfigError
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.model.config import ModelConfig
from common.model.description import LayerDescription, MlpDescription, MultiHeadDescription, NormDescription, multi_head
from common.model.sharding import (
    check_parallel,
    even_range,
    head_range,
    lm_head_in_layers,
    split_layers,
    vocab_range,
    vocab_rows,
)
from common.parallel.place import RankPlace


def config(q_heads: int, kv_heads: int, *, head_dim: int = 16, inner: int = 64) -> ModelConfig:
    attention = MultiHeadDescription(q_heads, kv_heads, head_dim, head_dim, scale=0.25)
    norm = NormDescription(1e-6)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        layers=(LayerDescription(attention, MlpDescription(inner, "silu"), norm),) * 24,
        final_norm=norm,
        vocab_size=250,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        dtype="float32",
        eos_token_ids=(),
        bos_token_id=None,
    )


def test_layers_are_split_evenly_and_the_last_stage_gets_the_smaller_share() -> None:
    assert split_layers(24, 5) == (5, 5, 5, 5, 4)
    assert split_layers(24, 1) == (24,)
    assert split_layers(3, 3) == (1, 1, 1)
    assert split_layers(24, 2, (10, 14)) == (10, 14)
    for layers in range(1, 30):
        for stages in range(1, layers + 1):
            split = split_layers(layers, stages)
            assert (sum(split), len(split)) == (layers, stages)
            assert list(split) == sorted(split, reverse=True)
            assert max(split) == -(-layers // stages)


def test_the_last_stage_has_fewer_layers_for_computing_the_lm_head() -> None:
    """As Qwen2.5-0.5B: 24 layers, and an LM head with the weights of nine."""
    model = replace(config(14, 2, head_dim=64, inner=4864), hidden_size=896, vocab_size=151_936)
    head = lm_head_in_layers(model)
    assert head == pytest.approx(151_936 * 896 / (896 * 64 * (14 + 2) * 2 + 3 * 896 * 4864))
    assert split_layers(24, 2, lm_head=head) == (17, 7)
    assert split_layers(24, 3, lm_head=head) == (11, 11, 2)
    assert split_layers(3, 3, lm_head=head) == (1, 1, 1)
    assert split_layers(24, 2, (12, 12), lm_head=head) == (12, 12)
    for stages in range(2, 25):
        split = split_layers(24, stages, lm_head=1.5)
        worst = max(*split[:-1], split[-1] + 1.5)
        assert sum(split) == 24
        assert min(split) >= 1
        assert worst <= max(-(-25.5 // stages) + 1, 2.5)


@pytest.mark.parametrize(
    ("stages", "explicit", "message"),
    [
        (0, None, "1 to 24"),
        (25, None, "1 to 24"),
        (2, (24,), "has 1 stages, not the 2 asked for"),
        (2, (10, 13), "sums to 23"),
        (2, (24, 0), "at least one per stage"),
    ],
)
def test_an_impossible_pipeline_is_refused(stages: int, explicit: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_layers(24, stages, explicit)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "tp", "message"),
    [
        (14, 2, 4, r"14 query heads; sizes that would work: \[1, 2, 14\]"),
        (6, 3, 2, r"3 KV heads; sizes that would work: \[1, 3, 6\]"),
        (4, 4, 0, r"sizes that would work: \[1, 2, 4\]"),
    ],
)
def test_an_impossible_tensor_split_is_refused_with_the_possible_ones(
    q_heads: int, kv_heads: int, tp: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_parallel(config(q_heads, kv_heads), tp)


def test_an_mlp_narrower_than_its_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"an MLP of 10; sizes that would work: \[1, 2, 4, 8\]"):
        check_parallel(config(16, 1, inner=10), 16)


def test_a_pipeline_that_misses_a_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="sums to 23"):
        check_parallel(config(4, 4), 1, (10, 13))
    check_parallel(config(4, 4), 4, (10, 14))


@pytest.mark.parametrize("q_heads", [1, 4, 6, 14, 16])
def test_heads_are_those_of_the_kv_layout_and_serve_their_queries(q_heads: int) -> None:
    for kv_heads in (n for n in range(1, q_heads + 1) if q_heads % n == 0):
        model = config(q_heads, kv_heads)
        attention = multi_head(model.layers[0])
        for tp in range(1, q_heads + 1):
            try:
                check_parallel(model, tp)
            except ConfigError:
                continue
            layout = KVLayout(
                "f", KVSpec.uniform(model.num_layers, kv_heads, attention.head_dim, "float32"), tp_size=tp
            )
            ranges = [head_range(attention, rank, tp) for rank in range(tp)]
            assert [q for r in ranges for q in range(r.q_lo, r.q_hi)] == list(range(q_heads))
            for rank, heads in enumerate(ranges):
                shard = layout.shard(rank, 0)
                assert (heads.kv_lo, heads.kv_hi) == (shard.parts[0].head_lo, shard.parts[0].head_hi)
                # As attention groups them: equal runs of query heads per KV head.
                group = heads.num_q // heads.num_kv
                for i, q in enumerate(range(heads.q_lo, heads.q_hi)):
                    assert q // (q_heads // kv_heads) == heads.kv_lo + i // group


@pytest.mark.parametrize(("vocab", "tp"), [(250, 1), (250, 4), (251, 4), (5, 4), (7, 3), (64, 2)])
def test_ranges_cover_everything_once(vocab: int, tp: int) -> None:
    for ranges in ([vocab_range(vocab, tp, r) for r in range(tp)], [even_range(vocab, tp, r) for r in range(tp)]):
        assert [i for lo, hi in ranges for i in range(lo, hi)] == list(range(vocab))
    assert all(hi - lo <= vocab_rows(vocab, tp) for lo, hi in (vocab_range(vocab, tp, r) for r in range(tp)))


def test_ranks_are_numbered_as_the_kv_layouts_shards() -> None:
    layout = KVLayout("f", KVSpec.uniform(6, 4, 16, "float32"), tp_size=2, pp_layers=(1, 2, 3))
    for rank, shard in enumerate(layout.shards()):
        place = RankPlace.of(rank, 2, 3)
        assert (place.rank, place.tp_rank, place.pp_rank) == (rank, shard.tp_rank, shard.pp_rank)
        assert place.tp_peers[place.tp_rank] == rank

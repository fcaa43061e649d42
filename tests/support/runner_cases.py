"""Drives a runner like a scheduler, and compares its tokens with those of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import pytest
import torch
from support.oracle import agreed, first_difference, greedy, prompt_logprobs
from support.recording import Recorder
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionShape
from common.attention.choose import choose_attention
from common.attention.cpu import CpuAttention
from common.attention.grouped import attention_of_groups
from common.attention.latent import LatentBackend, LatentShape
from common.config.option_groups import ModelImpl, Quantization
from common.control.messages import PromptLogprobs, SamplingParams
from common.engine.kv_allocator import first_seen
from common.engine.runner import ModelRunner
from common.engine.step import SampleSpec, ScoredRows, StepInput, StepOutput
from common.kv.rank_layout import KVLayout, blocks_for
from common.kv.storage import GroupStorage, KVStorage
from common.model.choose import choose_model
from common.model.kv_spec import kv_spec
from common.model.loader import load_model

BLOCK = 16
NUM_BLOCKS = 400
NUM_TOKENS = 24


class Runner(Protocol):
    """Runs a step."""

    def execute(self, step: StepInput) -> StepOutput:
        """Compute all rows, draw all samples."""
        ...


def make_runner(
    path: Path,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    *,
    max_model_len: int = 2048,
    quantization: Quantization = "auto",
    model_impl: ModelImpl = "native",
    chooses_attention: bool = False,
) -> ModelRunner:
    """`chooses_attention`: as a node does, else plain tensor operations attend."""
    config = choose_model(path, model_impl).for_context(max_model_len)
    model = load_model(
        path, config, dtype=dtype, load_format="auto", seed=0, small_batches=True, quantization=quantization
    )
    layout = KVLayout("f", kv_spec(config, kv_dtype or dtype))
    shard = layout.shard(0, 0)
    scales = [tuple(model.kv_scales[layer] for layer in layers) for layers in layout.group_layers(shard)]
    storage = KVStorage(layout, shard, NUM_BLOCKS, scales=scales)
    for group in storage.groups:  # What a reused block may hold must never reach a result.
        for plane in group.planes.values():
            plane.fill_(min(1e4, torch.finfo(group.dtype).max))
    shapes = model.attention_shapes(BLOCK)
    if chooses_attention:
        return ModelRunner(model, storage, choose_attention(storage, shapes))
    return ModelRunner(model, storage, attention_of_groups(storage, shapes, by_tensor_operations))


def by_tensor_operations(kv: GroupStorage, shape: AttentionShape) -> AttentionBackend:
    """The reference backends."""
    usual = CpuAttention(kv, shape)
    return LatentBackend(kv, shape, usual) if isinstance(shape, LatentShape) else usual


@dataclass
class Sequence:
    """One request, in the form that a scheduler keeps."""

    tokens: list[int]
    tables: list[list[int]]
    """[block tables][blocks]"""
    want: int = NUM_TOKENS
    prompt_len: int = 0
    computed: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scored: list[PromptLogprobs] = field(default_factory=list)


def drive(runner: Runner, prompts: list[list[int]], chunk: int, want: int = NUM_TOKENS) -> list[Sequence]:
    """All prompts together, at most `chunk` prompt tokens of each per step, greedy, in scattered blocks; those behind a
    sliding window are taken away."""
    computes = runner.runner if isinstance(runner, Recorder) else runner
    windows = kv_spec(computes._model.config, "float32").windows if isinstance(computes, ModelRunner) else (None,)
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(len(prompts))).tolist()
    unused = free.pop()
    sequences = [
        Sequence(list(p), [[free.pop() for _ in range(blocks_for(len(p) + want) + 1)] for _ in windows], want, len(p))
        for p in prompts
    ]
    while running := [s for s in sequences if len(s.generated) < s.want]:
        running.sort(key=lambda s: len(s.tokens) - s.computed != 1)
        lens = [min(chunk, len(s.tokens) - s.computed) for s in running]
        samples = [
            SampleSpec(
                i, end - 1, SamplingParams(0, want, temperature=0.0, logprobs=2), len(s.tokens), len(s.generated)
            )
            for i, (s, n, end) in enumerate(zip(running, lens, accumulate(lens), strict=True))
            if s.computed + n == len(s.tokens)
        ]
        scored = [
            ScoredRows(i, end - n, s.tokens[s.computed + 1 : min(s.computed + n, s.prompt_len - 1) + 1], 3)
            for i, (s, n, end) in enumerate(zip(running, lens, accumulate(lens), strict=True))
            if s.computed < s.prompt_len - 1
        ]
        places = [(s, p) for s, n in zip(running, lens, strict=True) for p in range(s.computed, s.computed + n)]
        output = runner.execute(
            StepInput(
                step_id=1,
                token_ids=[s.tokens[p] for s, p in places],
                positions=[p for _, p in places],
                slot_mapping=[
                    [s.tables[t][p // BLOCK] * BLOCK + p % BLOCK for s, p in places] for t in range(len(windows))
                ],
                query_lens=lens,
                context_lens=[s.computed + n for s, n in zip(running, lens, strict=True)],
                block_tables=[[list(s.tables[t]) for s in running] for t in range(len(windows))],
                num_decode_seqs=sum(len(s.tokens) - s.computed == 1 for s in running),
                samples=samples,
                scored=scored,
            )
        )
        for s, n in zip(running, lens, strict=True):
            s.computed += n
            for table, window in zip(s.tables, windows, strict=True):
                behind = first_seen(s.computed, window)
                table[:behind] = [unused] * behind
        for rows, found in zip(scored, output.prompt_logprobs, strict=True):
            running[rows.seq_index].scored += found
        for spec, drawn in zip(samples, output.sampled, strict=True):
            assert drawn.logprobs is not None
            assert drawn.logprobs.top_ids[0] == drawn.token_id
            s = running[spec.seq_index]
            s.tokens.append(drawn.token_id)
            s.generated.append(drawn.token_id)
            s.logprobs.append(drawn.logprobs.logprob)
    return sequences


def prompt(length: int, vocab: int) -> list[int]:
    return [(37 * i + 11 * length) % (vocab - 3) + 3 for i in range(length)]


def check(path: Path, prompts: list[list[int]], sequences: list[Sequence], want: int = NUM_TOKENS) -> None:
    excused = 0
    for tokens, sequence in zip(prompts, sequences, strict=True):
        expected = greedy(path, tokens, want)
        assert first_difference(expected, sequence.generated) is None, (len(tokens), expected.gaps)
        same = agreed(expected, sequence.generated)
        excused += same < want
        check_scored(tokens, sequence.scored, prompt_logprobs(path, tokens))
        assert sequence.logprobs[:same] == pytest.approx(expected.logprobs[:same], abs=1e-4)
    print(f"excused divergences: {excused} of {len(prompts)}")


def check_scored(prompt_ids: list[int], scored: list[PromptLogprobs], expected: Tensor) -> None:
    """expected: [n - 1, vocab] log-probabilities of a prompt of n tokens."""
    assert len(scored) == len(prompt_ids) - 1
    for token, ours, theirs in zip(prompt_ids[1:], scored, expected, strict=True):
        own = theirs[token].item()
        assert ours.logprob == pytest.approx(own, abs=1e-4)
        assert int((theirs > own + 1e-4).sum()) < ours.rank <= int((theirs >= own - 1e-4).sum())
        assert ours.top_logprobs == pytest.approx(theirs.topk(len(ours.top_ids)).values.tolist(), abs=1e-4)
        assert ours.top_logprobs == pytest.approx(theirs[ours.top_ids].tolist(), abs=1e-4)

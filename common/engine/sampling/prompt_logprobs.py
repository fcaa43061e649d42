"""Log-probabilities of a prompt's own tokens, from the logits of its rows. Engine thread of the rank that samples.

The logits of all rows of a prompt do not fit into memory: they are computed in slices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.control.messages import WHOLE_VOCABULARY, PromptLogprobs
from common.control.whole_vocabulary import packed
from common.engine.device_inputs import to_device
from common.engine.sampling.logprobs import logprobs_of, recorded_event, to_host
from common.engine.step import ScoredRows

_SLICE_LOGITS = 2**22
"""Logits that are in memory at a time: 16 MB, and several times that for intermediates."""


class ScoredPrompts:
    """What `score_prompts` computed, on its way to the host."""

    def __init__(self, slices: list[tuple[int, list[Tensor]]], count: int) -> None:
        """slices: for each its index in `StepInput.scored`, and [m] log-probabilities of the prompt's tokens, [m] ranks,
        [m, k] most likely ids, [m, k] their log-probabilities; for whole vocabularies also [m] norms and [m, vocab] logits
        (`common.control.whole_vocabulary`). `count`: length of `StepInput.scored`."""
        self._count = count
        self._arriving = [(index, [to_host(each) for each in tensors]) for index, tensors in slices]
        self._arrived = recorded_event(slices[-1][1][0]) if slices else None

    def wait(self) -> list[list[PromptLogprobs]]:
        """The log-probabilities for each `ScoredRows` of the step (`StepOutput.prompt_logprobs`). Any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()
        out: list[list[PromptLogprobs]] = [[] for _ in range(self._count)]
        for index, tensors in self._arriving:
            lists = [each.tolist() for each in tensors[:4]]
            if len(tensors) > 4:
                norms, logits = tensors[4:]
                lists.append([packed(*each) for each in zip(logits.numpy(), norms.tolist(), strict=True)])
            out[index] += map(PromptLogprobs, *lists)
        return out


def score_prompts(
    logits_of: Callable[[Tensor], Tensor | None], hidden: Tensor, vocab: int, scored: list[ScoredRows]
) -> ScoredPrompts:
    """hidden: [T, hidden], the step's output. `logits_of`: from [m, hidden] to [m, vocab] float32; None on ranks that do
    not sample, which must all call this because it computes the logits together."""
    size = max(1, _SLICE_LOGITS // vocab)
    slices: list[tuple[int, list[Tensor]]] = []
    for index, rows in enumerate(scored):
        for start in range(0, len(rows.token_ids), size):
            tokens = rows.token_ids[start : start + size]
            logits = logits_of(hidden[rows.row + start : rows.row + start + len(tokens)])
            if logits is not None:
                slices.append((index, _scored(logits, to_device(tokens, logits.device), rows.num_top)))
    return ScoredPrompts(slices, len(scored))


def _scored(logits: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
    own, ids, top, norms = logprobs_of(logits, logits.amax(-1), tokens, max(0, count))
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(-1, dtype=torch.int64)
    return [own, ranks, ids, top, *((norms, logits.clone()) if count == WHOLE_VOCABULARY else ())]

"""`transformers`' own continuous batching of the same shape on the same device, for comparison. A worker process."""

from __future__ import annotations

import random
import time
from typing import Any

import torch


class Transformers:
    """A model with random weights; `serve` answers many prompts at once."""

    def __init__(self, folder: str, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            self._model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self._vocab_size = config.vocab_size
        self._rng = random.Random(1)

    def serve(self, requests: int, prompt: int, tokens: int) -> float:
        """Output tokens/s of `requests` prompts given at once, from the first to the last."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        inputs = [[self._rng.randrange(3, self._vocab_size) for _ in range(prompt)] for _ in range(requests)]
        generation = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(max_requests_per_batch=requests, allow_block_sharing=False)
        if not torch.cuda.is_available():
            # The size of a block has another name in transformers 5.17 than in 5.23.
            batching = ContinuousBatchingConfig(
                num_blocks=8, max_batch_tokens=256, allow_block_sharing=False, use_cuda_graph=False
            )

        def answer() -> Any:
            return self._model.generate_batch(inputs, generation_config=generation, continuous_batching_config=batching)

        # Its manager captures graphs and compiles at the first call; the second is the one that counts.
        answer()
        started = time.perf_counter()
        answers = answer()
        took_s = time.perf_counter() - started
        count = sum(len(answer.generated_tokens) for answer in answers.values())
        if count < requests * tokens:
            raise RuntimeError(f"transformers answered with {count} tokens instead of {requests * tokens}")
        return count / took_s

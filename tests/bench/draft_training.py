"""Trains a draft model of one layer or two on a model's own answers. A program: `python -m bench.draft_training --help`.

The answers are those of the real small model to questions made from templates. The draft has the model's embedding, LM head and
final norm, and begins with copies of its first and last layers; only the layers and the norm are trained, to predict the next token of
the answers among the tokens that answers use and some others: all 49,152 would take most of the time.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.real_small_model import to_transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from common.base.cache_folder import cache_folder
from kvrelay import LLM, SamplingParams
from scripts.small_model import fetch

QUESTIONS = (
    "Explain how {} works.",
    "Write a short story about {}.",
    "Give me five tips for {}.",
    "What are the advantages of {}?",
    "Describe {} to a child.",
    "Write an email to a friend about {}.",
    "What should a beginner know about {}?",
    "Why is {} important?",
)
TOPICS = (
    *("a bicycle", "the moon", "cooking pasta", "a garden", "learning English", "a good night's sleep", "the sea"),
    *("a library", "drinking water", "trains", "a computer", "swimming", "photography", "the weather", "coffee"),
    *("a job interview", "public transport", "music lessons", "a birthday party", "chess", "recycling", "volcanoes"),
    *("a healthy breakfast", "mountain hiking", "the human heart", "solar energy", "painting", "a family dog", "tea"),
    *("saving money", "a long journey", "electric cars", "reading books", "the internet", "bees", "a small business"),
    *("running a marathon", "the brain", "video games", "winter", "yoga", "city parks", "bread", "a telescope"),
)
HELD_OUT = ("a lighthouse", "growing tomatoes", "bridges", "a museum visit")
"""Topics that no draft is trained on."""
_NEW_TOKENS = 160
_SEQS = 64
"""Questions that are answered at once."""
_PEAK, _BATCH, _OTHERS = 2e-3, 16, 1024
"""Highest learning rate; answers of a training step, and tokens in it that no answer uses."""


def draft_folder() -> Path:
    """Where the trained draft is kept, beside the model."""
    return cache_folder() / "small-model" / "draft"


class Guessing:
    """The real small model, alone or with the trained draft, one stream after the other."""

    def __init__(self, speculate: str) -> None:
        self._llm = LLM(str(fetch()), kv_memory_gb=0.2, max_model_len=512, speculate=speculate)

    def rate(self, temperature: float, count: int) -> float:
        """Tokens/s of `count` answers to questions about topics that no draft was trained on."""
        started, tokens = time.perf_counter(), 0
        for seed, prompt in enumerate(questions(HELD_OUT)[:count]):
            params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=temperature, seed=seed)
            tokens += len(self._llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
        return tokens / (time.perf_counter() - started)


def questions(topics: tuple[str, ...]) -> list[str]:
    """Each question about each topic, as the model's chat template writes it."""
    texts = [question.format(topic) for question, topic in itertools.product(QUESTIONS, topics)]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]


def answers(model: Path, seconds: float) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of as many questions as are answered in about `seconds`, half of them greedy."""
    draw, found = random.Random(1), list[tuple[list[int], list[int]]]()
    until_s = time.monotonic() + seconds
    with LLM(str(model), kv_memory_gb=1.0, max_model_len=512, max_num_seqs=_SEQS) as llm:
        prompts = questions(TOPICS)
        for round_ in itertools.count():
            asked = draw.sample(prompts, _SEQS)
            params = [
                SamplingParams(max_tokens=_NEW_TOKENS, temperature=float(n % 2), seed=1000 * round_ + n)
                for n in range(_SEQS)
            ]
            for output in llm.generate(asked, params, use_tqdm=False):
                found.append((output.prompt_token_ids, list(output.outputs[0].token_ids)))
            if time.monotonic() > until_s:
                return found
    raise AssertionError


def train(model: Path, pairs: list[tuple[list[int], list[int]]], folder: Path, num_layers: int, seconds: float) -> None:
    """Train a draft of `model` on these pairs of prompt and answer for about `seconds`, and write it to `folder`."""
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as whole:
        to_transformers(model, Path(whole))
        target: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
        config = LlamaConfig.from_pretrained(whole)
        config.num_hidden_layers = num_layers
        draft: Any = LlamaForCausalLM(config)
        draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
        draft.model.norm.load_state_dict(target.model.norm.state_dict())
        for number, layer in enumerate(draft.model.layers):
            source = target.model.layers[0 if number == 0 else -1]
            layer.load_state_dict(source.state_dict())
        del target
        for name in ("tokenizer.json", "tokenizer_config.json"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(whole, name), folder / name)
    used = torch.tensor(sorted({token for _, answer in pairs for token in answer}))
    place = torch.zeros(config.vocab_size, dtype=torch.int64)
    place[used] = torch.arange(len(used))
    head = draft.model.embed_tokens.weight.detach().clone()
    draft.model.embed_tokens.weight.requires_grad_(False)
    weights = [each for each in draft.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    started, draw, steps = time.monotonic(), random.Random(1), 0
    order: list[tuple[list[int], list[int]]] = []
    while (share := (time.monotonic() - started) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _PEAK * min(1.0, (steps + 1) / 20) * (1.0 - share)
        if len(order) < _BATCH:
            order = draw.sample(pairs, len(pairs))
        batch, order = order[:_BATCH], order[_BATCH:]
        longest = max(len(prompt) + len(answer) for prompt, answer in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        wanted = torch.full((len(batch), longest), -100)
        for row, (prompt, answer) in enumerate(batch):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            wanted[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = place[torch.tensor(answer)]
        hidden = draft.model(ids).last_hidden_state[wanted >= 0]
        others = torch.randint(config.vocab_size, (_OTHERS,))
        others = others[~torch.isin(others, used)]
        logits, wanted = hidden @ head[torch.cat([used, others])].T, wanted[wanted >= 0]
        loss = cross_entropy(logits, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if steps % 10 == 0:
            right = (logits.argmax(-1) == wanted).float().mean()
            print(f"{share:.0%} step {steps}: loss {loss.item():.3f}, {right:.0%} right", flush=True)
        steps += 1
    tensors = {name: each.detach().bfloat16() for name, each in draft.state_dict().items() if name != "lm_head.weight"}
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    draft.config.save_pretrained(folder)


def main() -> None:
    """Bring the model, let it answer, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=draft_folder(), help="where the draft model is written")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--answer-s", type=float, default=600, help="seconds in which the model answers")
    parser.add_argument("--train-s", type=float, default=1200, help="seconds of training")
    args = parser.parse_args()
    model = fetch()
    train(model, answers(model, args.answer_s), args.folder, args.layers, args.train_s)


if __name__ == "__main__":
    main()

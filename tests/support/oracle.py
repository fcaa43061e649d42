"""Tiny random models of every supported family, and the tokens that `transformers` generates with them.

`support.tiny_models.TINY` names the models; `make_tiny(name, folder)` writes one as a Hugging Face directory, including a
tokenizer;
`greedy(folder, prompt, n)` is the expected answer. Weights are scaled so that logits differ by a few units: a wrong
implementation then generates other tokens, but rounding does not.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from support.tiny_models import TINY
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
tqdm.monitor_interval = 0  # a bar that huggingface_hub shows all the same would start a thread

EXCUSED_GAP = 1e-4
"""A differing greedy token is excused only where the oracle's own best two logits are closer than this."""


def _auto_class(config: PretrainedConfig):
    """The class of transformers that makes models of `config`: of text, or of text and images."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def architecture(config: PretrainedConfig) -> str:
    """The name of the model class that `config` belongs to."""
    return _auto_class(config)._model_mapping[type(config)].__name__


LONGROPE = "phi3-longrope"
"""transformers recomputes a context that becomes long; a shared cache of blocks cannot."""
OF_ANY_LENGTH = tuple(name for name in TINY if name != LONGROPE)
"""Models whose tokens are those of transformers for prompts of any length."""


def make_tiny(name: str, folder: Path, seed: int = 1) -> Path:
    """Write the model `name` to `folder`: config, weights (sharded where `TINY` says so), tokenizer. Returns `folder`."""
    tiny = TINY[name]
    return write_model(tiny.config, folder, seed, tiny.max_shard_size)


def write_model(config: PretrainedConfig, folder: Path, seed: int = 1, max_shard_size: str = "50GB") -> Path:
    """Write the model of `config`, with random weights, to `folder`, and a tokenizer. Returns `folder`."""
    model = _auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.3 * noise if key.endswith("bias") else 1.0 + 0.2 * noise)
            elif any(part in key for part in ("embed", "lm_head", "wte")):
                weight.copy_(3.0 * noise / weight.shape[1] ** 0.5)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_word_tokenizer(folder, config.get_text_config().vocab_size)
    return folder


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Words "w0" ... "wN", one per id, between spaces; a chat is its messages' words one after the other."""
    vocab = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


FIRST_WORD = 131
"""The first id of `save_spaced_tokenizer` that is a word."""


def piece(token_id: int) -> str:
    """The text of a token of `save_spaced_tokenizer`: a character, or a word with the space before it."""
    return f" w{token_id}" if token_id >= FIRST_WORD else chr(max(0, token_id - 3))


def save_spaced_tokenizer(folder: Path, vocab_size: int) -> None:
    """Replace the tokenizer of `save_word_tokenizer` by one of the ASCII characters and of words, for grammars: these need
    tokens for any beginning of a word. Texts become characters."""
    texts = ["<unk>", "<s>", "</s>", *map(piece, range(3, vocab_size))]
    vocab = {text.replace(" ", "▁"): token_id for token_id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "</s>", "bos_token": "<s>"}))


@dataclass(frozen=True)
class Expected:
    """What transformers generates: per position the token, its log-probability, and best minus second-best logit."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def greedy(model_dir: Path, prompt_ids: list[int], n: int) -> Expected:
    """`n` greedy tokens of `transformers`' `generate` in float32; end-of-sequence tokens do not end it."""
    return _greedy(str(model_dir), tuple(prompt_ids), n)


@functools.cache
def oracle_model(model_dir: str):
    """The model of `transformers` in float32."""
    auto_class = _auto_class(AutoConfig.from_pretrained(model_dir))
    return auto_class.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def _greedy(model_dir: str, prompt_ids: tuple[int, ...], n: int) -> Expected:
    model = oracle_model(model_dir)
    # The model's own generation config holds an end-of-sequence token, which a None in the call cannot undo.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=n, pad_token_id=0, eos_token_id=None, bos_token_id=1,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    prompt = torch.tensor([prompt_ids])
    with torch.inference_mode():
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt))
    tokens = answer.sequences[0, len(prompt_ids) :].tolist()
    logits = torch.cat(answer.logits).float()
    best = logits.topk(2).values
    logprobs = logits.log_softmax(-1)[range(n), tokens]
    return Expected(tokens, logprobs.tolist(), (best[:, 0] - best[:, 1]).tolist())


@functools.lru_cache(64)
def _prompt_logits(model_dir: str, prompt_ids: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle_model(model_dir)(torch.tensor([prompt_ids])).logits[0, :-1].double()


def prompt_logits(model_dir: Path, prompt_ids: list[int]) -> torch.Tensor:
    """[n - 1, vocab] float64: logits for each position after the first of a prompt of n tokens."""
    return _prompt_logits(str(model_dir), tuple(prompt_ids))


def prompt_logprobs(model_dir: Path, prompt_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the prompt tokens, from `prompt_logits`."""
    return prompt_logits(model_dir, prompt_ids).log_softmax(-1)


def first_difference(expected: Expected, tokens: list[int]) -> int | None:
    """Index of the first unexcused difference between `tokens` and the expected ones; None if there is none.

    The tokens after an excused difference belong to another text and are not compared.
    """
    for i, token in enumerate(tokens):
        if token != expected.tokens[i]:
            return None if expected.gaps[i] < EXCUSED_GAP else i
    return None if len(tokens) == len(expected.tokens) else len(tokens)


def agreed(expected: Expected, tokens: list[int]) -> int:
    """Number of leading tokens that are as expected."""
    return next(
        (i for i, pair in enumerate(zip(expected.tokens, tokens, strict=False)) if pair[0] != pair[1]), len(tokens)
    )


def most_likely_sequences(
    model_dir: Path, prompt: list[int], *, width: int, steps: int, ends: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """Token ids behind the prompt and their log-probability: a plain beam search over float32 logits, the best first."""
    model = oracle_model(str(model_dir))
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []

    def score(beam: tuple[tuple[int, ...], float]) -> float:
        return beam[1] / (len(prompt) + len(beam[0]) - (beam[0][-1] in ends))

    for _ in range(steps):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens] for tokens, _ in beams])).logits[:, -1]
        found = logits.float().log_softmax(-1).topk(2 * width)
        going: list[tuple[tuple[int, ...], float]] = []
        for (tokens, total), values, ids in zip(beams, found.values.tolist(), found.indices.tolist(), strict=True):
            for value, token in zip(values, ids, strict=True):
                (ended if token in ends else going).append(((*tokens, token), total + value))
        beams = sorted(going, key=score, reverse=True)[:width]
    return sorted([*ended, *beams], key=score, reverse=True)[:width]

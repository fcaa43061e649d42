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
<<<<<<< HEAD
=======
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
>>>>>>> 25e00bd1 (Latent attention: one plane without heads, expanded for prompts and absorbed for decode)
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


<<<<<<< HEAD
=======
def _shape(hidden: int, q_heads: int, kv_heads: int, inner: int, vocab: int, *, tied: bool) -> dict[str, object]:
    return {
        **_COMMON,
        "hidden_size": hidden,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


_GEMMA3 = {
    **_shape(64, 4, 2, 112, 264, tied=True),
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "attn_logit_softcapping": 2.0,  # which its classes ignore
    "final_logit_softcapping": 20.0,
    "pad_token_id": 0,
}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 3,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}

TINY: dict[str, Tiny] = {
    "llama": Tiny(LlamaConfig(**_shape(64, 4, 4, 112, 250, tied=False))),
    "mqa": Tiny(LlamaConfig(**_shape(64, 4, 1, 112, 263, tied=True))),
    "llama-biases": Tiny(LlamaConfig(**_shape(64, 4, 2, 112, 251, tied=True), attention_bias=True, mlp_bias=True)),
    "llama3": Tiny(LlamaConfig(**_shape(64, 4, 2, 96, 320, tied=True), rope_parameters=_LLAMA3_ROPE)),
    "large-vocabulary": Tiny(LlamaConfig(**_shape(64, 4, 2, 112, 152_000, tied=True))),
    "llama-linear": Tiny(
        LlamaConfig(
            **_shape(48, 6, 3, 80, 199, tied=False),
            rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        )
    ),
    "mistral": Tiny(MistralConfig(**_shape(64, 4, 2, 112, 257, tied=False), sliding_window=40)),
    "qwen2": Tiny(
        Qwen2Config(
            **_shape(112, 14, 2, 160, 301, tied=True), rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
        )
    ),
    "qwen2-window": Tiny(
        Qwen2Config(
            **_shape(64, 4, 2, 112, 302, tied=True), use_sliding_window=True, sliding_window=24, max_window_layers=1
        )
    ),
    "qwen3": Tiny(Qwen3Config(**_shape(64, 4, 2, 112, 259, tied=False), head_dim=32), max_shard_size="100KB"),
    "phi3": Tiny(
        Phi3Config(
            **_shape(64, 4, 2, 112, 253, tied=True),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            sliding_window=30,
            pad_token_id=0,
        )
    ),
    "phi3-longrope": Tiny(
        Phi3Config(
            **_shape(64, 4, 4, 112, 254, tied=False),
            rope_parameters=_LONGROPE,
            original_max_position_embeddings=32,
            pad_token_id=0,
        )
    ),
    "granite": Tiny(
        GraniteConfig(
            **_shape(64, 4, 2, 112, 255, tied=True),
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=0.7,
        )
    ),
    "smollm3": Tiny(
        SmolLM3Config(
            **_shape(64, 4, 2, 112, 256, tied=True),
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=24,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 2e6},
        )
    ),
    "olmo2": Tiny(Olmo2Config(**_shape(64, 4, 2, 112, 258, tied=False))),
    "starcoder2": Tiny(Starcoder2Config(**_shape(64, 4, 2, 128, 260, tied=True), sliding_window=48)),
    "gpt2": Tiny(GPT2Config(**_COMMON, n_embd=64, n_layer=3, n_head=4, vocab_size=261)),
    "opt": Tiny(
        OPTConfig(**_COMMON, hidden_size=64, ffn_dim=112, num_attention_heads=4, vocab_size=262, word_embed_proj_dim=64)
    ),
    "gemma2": Tiny(
        Gemma2Config(
            **_shape(64, 4, 2, 112, 265, tied=True),
            head_dim=32,
            query_pre_attn_scalar=4,
            sliding_window=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=10.0,
            pad_token_id=0,
        )
    ),
    "gemma3": Tiny(Gemma3TextConfig(**_GEMMA3)),
    "gemma3-vision": Tiny(
        Gemma3Config(
            text_config={**_GEMMA3, "vocab_size": 266},  # The class that takes images caps no logits either.
            vision_config={**_VISION, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28},
            mm_tokens_per_image=4,
            eos_token_id=2,
            bos_token_id=1,
        )
    ),
    "qwen2.5-vl": Tiny(
        Qwen2_5_VLConfig(
            text_config={
                **_shape(64, 4, 2, 112, 267, tied=False),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            vision_config={**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
            image_token_id=3,
            video_token_id=4,
            vision_start_token_id=5,
            tie_word_embeddings=False,
        )
    ),
    "deepseek-v2": Tiny(
        DeepseekV2Config(
            **_shape(64, 4, 4, 112, 304, tied=False),
            **_LATENT,
            q_lora_rank=None,
            rope_parameters={**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        )
    ),
    "deepseek-v3": Tiny(
        DeepseekV3Config(
            **_shape(64, 4, 4, 112, 305, tied=False),
            **_LATENT,
            q_lora_rank=40,
            rope_parameters={**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2},
        )
    ),
    "qwen2-yarn": Tiny(Qwen2Config(**_shape(64, 4, 2, 96, 303, tied=False), rope_parameters=_YARN_ROPE)),
}

>>>>>>> 25e00bd1 (Latent attention: one plane without heads, expanded for prompts and absorbed for decode)
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

"""The model that the benchmarks load: a shape without trained weights, its folder, and what one token of it costs."""

from __future__ import annotations

import itertools
import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@dataclass(frozen=True)
class Shape:
    """A Qwen2, Llama or Qwen3-MoE model's dimensions."""

    name: str
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 64
    is_llama: bool = False
    """No biases, and an LM head of its own; else Qwen2, whose LM head is the embedding."""
    experts: int = 0
    """Experts of each layer, each `intermediate` features wide. If there are any, the model is a Qwen3-MoE."""
    top_k: int = 1
    """Experts that one token chooses."""

    @property
    def family(self) -> str:
        """The `model_type` of its config.json."""
        return "qwen3_moe" if self.experts else "llama" if self.is_llama else "qwen2"

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of all layers that one token uses, without the LM head."""
        return self._layer_weights(self.top_k)

    def _layer_weights(self, mlps: float) -> int:
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        router = self.hidden * self.experts
        return self.layers * (attention + router + int(mlps * 3 * self.hidden * self.intermediate))

    def weight_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of weights that one decode step of one sequence must read: all layers and the LM head."""
        return self.weight_bytes_per_step(1, element_bytes)

    def weight_bytes_per_step(self, rows: int, element_bytes: int = 2) -> int:
        """The same for several sequences, which choose their experts evenly and independently."""
        mlps = self.experts * (1 - (1 - self.top_k / self.experts) ** rows) if self.experts else 1
        return element_bytes * (self._layer_weights(mlps) + self.vocab * self.hidden)

    def prefill_flop(self, tokens: int) -> float:
        """Floating-point operations of a prompt: linear layers, causal attention (no masked pair), one row of the LM head."""
        linear = 2.0 * self.layer_weights * tokens + 2.0 * self.vocab * self.hidden
        pairs = tokens * (tokens + 1) / 2
        return linear + 4.0 * self.layers * self.q_heads * self.head_dim * pairs

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


SHAPES = {
    "0.5b": Shape("0.5b", hidden=896, layers=24, q_heads=14, kv_heads=2, intermediate=4864, vocab=151_936),
    "8b": Shape("8b", 4096, 32, 32, 8, intermediate=14_336, vocab=128_256, head_dim=128, is_llama=True),
    # 67 MB of weights in bfloat16.
    "33m": Shape("33m", 512, 8, 8, 4, intermediate=1536, vocab=8192, is_llama=True),
    # 0.47B weights of 4.3B are used by a token; 8.7 GB in bfloat16.
    "4b-moe": Shape("4b-moe", 1024, 20, 16, 4, intermediate=512, vocab=151_936, is_llama=True, experts=128, top_k=8),
    # Only shows that the benchmarks run; its figures mean nothing.
    "tiny": Shape("tiny", hidden=256, layers=2, q_heads=4, kv_heads=2, intermediate=512, vocab=20_000),
}


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def make_model_folder(shape: Shape, parent: Path) -> Path:
    """A folder with config and tokenizer for `--load-format dummy`; made once, then kept."""
    folder = parent / f"model-{shape.name}"
    done = folder / "tokenizer_config.json"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": not shape.is_llama,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "bos_token_id": 0}), "utf-8")
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"), pretty=False)
    done.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
    return folder


def _tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab` ids: the bytes, then runs of letters of growing length, most with a space."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    space = "Ġ"
    words = (
        (start, "".join(letters))
        for length in itertools.count(1)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
        for start in ("", space)
        if len(start) + length > 1
    )
    # Every token but a byte is a shorter token and one more letter, so that every merge has both its parts.
    for start, letters in itertools.islice(words, vocab - len(tokens)):
        merges.append((start + letters[:-1], letters[-1]))
    tokens += [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_prompt(shape: Shape, tokens: int, rng: random.Random) -> list[int]:
    """Token ids that no prefix cache has seen."""
    return [rng.randrange(256, shape.vocab) for _ in range(tokens)]


def random_text(words: int, rng: random.Random) -> str:
    """Text of about `words` tokens."""
    return "".join(" " + "".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(words))

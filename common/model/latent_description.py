"""Description of latent attention: `common.model.latent_attention` builds from it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.spec import KVPlane
from common.model.description import AttentionDescription, LinearShape, NormDescription, Split, WeightNames


@dataclass(frozen=True)
class LatentDescription(AttentionDescription):
    """Query heads over one latent for each token, from which each head makes its key and value, and one rotated key that
    all heads share. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    kind = "latent"
    num_heads: int
    latent_dim: int
    """Width of the latents of keys and values."""
    rope_dim: int
    """Features of each query head, and of the shared key, that are rotated."""
    nope_dim: int
    """Features of each query head, and of the keys made of latents, that are not."""
    v_head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    norm: NormDescription
    """Norm of the latents, of keys and values as of queries."""
    q_latent_dim: int | None = None
    """Width of the latents that queries are made of; None: they are made of hidden states."""
    has_adjacent_pairs: bool = True
    """Whether rope rotates features 2i and 2i + 1, instead of i and i + rope_dim / 2."""
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"

    @property
    def q_head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers cached for each token: the latent, after its norm, and the rotated key."""
        return self.latent_dim + self.rope_dim

    @property
    def planes(self) -> tuple[KVPlane, ...]:
        return (KVPlane("latent", self.width),)

    @property
    def plane_heads(self) -> int:
        return 1

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        """Without `kv_up`, whose two halves are no linear layers here: one is applied to queries, the other to results."""
        of_heads = self.num_heads * self.q_head_dim
        queries = [LinearShape(names.q, of_heads, hidden)]
        if self.q_latent_dim is not None:
            queries = [
                LinearShape(self.q_down, self.q_latent_dim, hidden),
                LinearShape(self.q_up, of_heads, self.q_latent_dim),
            ]
        return [
            *queries,
            LinearShape(self.kv_down, self.width, hidden),
            LinearShape(names.output, hidden, self.num_heads * self.v_head_dim),
        ]

    def splits(self) -> list[Split]:
        return [Split(f"{self.num_heads} heads over latents", lambda ranks: self.num_heads % ranks == 0)]

"""Qwen3, dense: q and k are normalised per head before rope."""

from __future__ import annotations

from common.model.build import Build
from common.model.decoder import DecoderModel
from common.model.layers import Attention, HeadNorm


class Qwen3Model(DecoderModel):
    """Qwen3ForCausalLM."""

    def build_attention(self, build: Build, prefix: str) -> Attention:
        head_dim = build.config.head_dim
        q_weight, k_weight = (build.read(f"{prefix}.{part}_norm.weight", head_dim) for part in "qk")
        norm = HeadNorm(q_weight, k_weight, build.heads, build.config.rms_norm_eps, build.kernels)
        return Attention(build, prefix, norm)

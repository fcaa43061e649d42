"""Qwen2 and Qwen2.5, dense: the plain decoder; `ModelConfig.attention_bias` gives q, k and v their biases."""

from __future__ import annotations

from common.model.decoder import DecoderModel


class Qwen2Model(DecoderModel):
    """Qwen2ForCausalLM."""

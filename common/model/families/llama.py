"""Llama 2 and 3, TinyLlama, Mistral: the plain decoder. Rope scaling and biases come from the config."""

from __future__ import annotations

from common.model.decoder import DecoderModel


class LlamaModel(DecoderModel):
    """LlamaForCausalLM, MistralForCausalLM."""

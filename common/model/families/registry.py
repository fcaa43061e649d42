"""Which class runs which architecture. `common.model.config` says the same to processes without torch."""

from __future__ import annotations

from common.model.decoder import DecoderModel
from common.model.families.llama import LlamaModel
from common.model.families.qwen2 import Qwen2Model
from common.model.families.qwen3 import Qwen3Model

MODELS: dict[str, type[DecoderModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen3ForCausalLM": Qwen3Model,
}

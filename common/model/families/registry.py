"""The architectures that can be served. A new family is one file here and one entry in this list. No torch."""

from __future__ import annotations

from common.model.families.base import Family
from common.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from common.model.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT_PART
from common.model.families.glm4_moe import GLM4_MOE
from common.model.families.gpt2 import GPT2, OPT
from common.model.families.gpt_oss import GPT_OSS
from common.model.families.granite import GRANITE, GRANITE_MOE
from common.model.families.llama import LLAMA
from common.model.families.mistral import MISTRAL, MIXTRAL
from common.model.families.olmo2 import OLMO2
from common.model.families.phi3 import PHI3
from common.model.families.qwen import QWEN2, QWEN2_5_VL_TEXT_PART, QWEN3, QWEN3_MOE
from common.model.families.smollm3 import SMOLLM3
from common.model.families.starcoder2 import STARCODER2

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN2_5_VL_TEXT_PART, QWEN3, PHI3, GRANITE, SMOLLM3, OLMO2, STARCODER2, GPT2, OPT),
    *(GEMMA2, GEMMA3, GEMMA3_TEXT_PART, QWEN3_MOE, MIXTRAL, GPT_OSS, GLM4_MOE, GRANITE_MOE, DEEPSEEK_V2, DEEPSEEK_V3),
)
FAMILIES: dict[str, Family] = {architecture: family for family in _ALL for architecture in family.architectures}
_HEADS = ("ForCausalLM", "LMHeadModel")
_OTHERWISE_NAMED = {"Gemma3TextModel": "Gemma3ForCausalLM", "Gemma3Model": None}
"""`Gemma3Model` takes images, too."""


def with_head(name: str) -> str | None:
    """The class with an LM head that a native family has beside the class `name`, such as `Qwen3Model`; None if there is none."""
    if name in _OTHERWISE_NAMED or not name.endswith("Model"):
        return _OTHERWISE_NAMED.get(name)
    return next((found for head in _HEADS if (found := name.removesuffix("Model") + head) in FAMILIES), None)

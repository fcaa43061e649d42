"""The architectures that can be served. A new family is one file here and one entry in this list. No torch."""

from __future__ import annotations

from common.model.families.base import Family
from common.model.families.llama import LLAMA
from common.model.families.mistral import MISTRAL
from common.model.families.qwen2 import QWEN2
from common.model.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {
    architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3) for architecture in family.architectures
}

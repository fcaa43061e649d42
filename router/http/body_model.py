"""The base of all models of request bodies. Pure."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from common.base.message_types import fail_fast


class BodyModel(BaseModel):
    """Types are not converted, unknown fields are ignored, and lists end at their first wrong item."""

    model_config = ConfigDict(strict=True, extra="ignore")

    PASSED_ON: ClassVar[frozenset[str]] = frozenset()
    """Further fields of the chat call that this call takes or refuses."""
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()
    """Fields of the call's own API that have no effect here, beside those of all calls."""
    KNOWN_WITHIN: ClassVar[dict[str, frozenset[str]]] = {}
    """By field: the known names in its object; others are unknown."""
    OWN_NAMES: ClassVar[dict[str, str]] = {}
    """By path of a field of the chat request that a body becomes: the path of this body's field that means the same, with `*` for
    an index."""

    @staticmethod
    def left_out(body: dict[str, Any]) -> list[str]:
        """The parts of a body that are ignored, as `FIELD.KIND`."""
        return []

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return fail_fast(handler(source))

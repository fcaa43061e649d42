"""The base of all models of request bodies. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from common.base.message_types import fail_fast


class BodyModel(BaseModel):
    """Lists end at their first wrong item."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return fail_fast(handler(source))

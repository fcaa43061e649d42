"""JSON objects that templates may take for text. Pure."""

from __future__ import annotations

import json
from typing import Any


class JsonText(dict[str, Any]):
    """A JSON object that joins texts as JSON: some templates take a call's arguments for the text that clients send."""

    def __add__(self, other: str) -> str:
        return json.dumps(self, ensure_ascii=False) + other

    def __radd__(self, other: str) -> str:
        return other + json.dumps(self, ensure_ascii=False)

"""Makes random JSON schemas."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ["^[a-c]{1,4}$", "^x", "[0-9]{2}$", "^(yes|no)$", "^\\d{3}-\\d{2}$", "a.b"]
_WORDS = ["a", "id", "some name", 'quo"te', "é", "日本", "x/y"]


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts are bounded."""
    kinds = ["integer", "number", "string", "pattern", "enum", "const", "boolean", "null", "format"]
    if depth < 3:
        kinds += ["object", "object", "object", "array", "array", "anyOf"]
    match draw.choice(kinds):
        case "object":
            names = draw.sample(_WORDS, draw.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": [name for name in names if draw.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            least = draw.randrange(3)
            items = random_schema(draw, depth + 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randrange(3)}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
        case "integer":
            least = draw.randrange(-500, 500)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randrange(300)}
        case "number":
            low, high = draw.choice(["minimum", "exclusiveMinimum"]), draw.choice(["maximum", "exclusiveMaximum"])
            begin = draw.randrange(-3, 4) / 2
            return {"type": "number", low: begin, high: begin + draw.choice([0.5, 1.25, 1000])}
        case "string":
            least = draw.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(5)}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 12}
        case "enum":
            return {"enum": draw.sample([1, -2.5, "two", None, True, ["x", 3], {"k": "v"}, 'a"b\\'], 3)}
        case "const":
            return {"const": draw.choice(["fixed", 7, {"deep": [1, {"er": None}]}, []])}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])}
        case kind:
            return {"type": kind}

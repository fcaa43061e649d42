"""Bounds and constants of numbers in JSON schemas, as llguidance holds them: it reads float64, and integers of 64 bits. Pure."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from common.base.errors import BadRequest
from router.output.json_values import elements, members

_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_END = 1 << 63
_LARGEST = _END - 1024
"""The largest float64 below `_END`."""
_NEAR_ZERO = 1e-20


def hold_numbers(schema: dict[str, Any]) -> None:
    """Make the bounds of one schema, not those within it, such that no number beyond them is admitted.

    Raises: BadRequest for bounds and constants that cannot be held.
    """
    for key in ("const", "enum"):
        if key in schema:
            _check_constants(key, schema[key])
    for key in (*_LOWER, *_UPPER):
        if key in schema and _is_number(schema[key]):
            schema[key] = _held(key, schema[key], integer=schema.get("type") == "integer")
    if schema.get("type") != "integer":
        _leave_out(schema, "exclusiveMinimum", "minimum", _UPPER, 1)
        _leave_out(schema, "exclusiveMaximum", "maximum", _LOWER, -1)


def _is_number(value: Any) -> TypeGuard[float]:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _check_constants(keyword: str, value: Any) -> None:
    """Refuse numbers that would be written as others: integers that no float64 is, and all beyond 64 bits."""
    stack: list[Any] = [value]
    while stack:
        node = stack.pop()
        stack += [*members(node).values(), *elements(node)]
        if _is_number(node) and (abs(node) >= _END or float(node) != node):
            limit = "2^63" if abs(node) >= _END else "2^53"
            raise BadRequest(
                f"the schema's keyword {keyword} is not supported with {str(node)[:40]}, which is beyond {limit}"
            )


def _held(key: str, bound: float, *, integer: bool) -> float:
    """The nearest bound that is a float64 within 64 bits, and not beyond this one."""
    sign = 1 if key in _LOWER else -1
    least = sign * bound
    if least >= _END:
        raise BadRequest(f"the schema's keyword {key} is not supported with {str(bound)[:40]}, which is beyond 2^63")
    if least <= 1 - _END:
        return bound if integer and key in _UPPER else -sign * _LARGEST
    nearest = float(least)
    if nearest < least:
        nearest = math.nextafter(nearest, math.inf)
    return bound if nearest == least else sign * int(nearest)


def _leave_out(schema: dict[str, Any], exclusive: str, inclusive: str, others: tuple[str, str], sign: int) -> None:
    """Exclude an integer that is the bound nearest to 0, where the other bound is less than 1 away: llguidance would admit it."""
    bound = schema.get(exclusive)
    if not _is_number(bound) or not float(bound).is_integer() or sign * bound < 0:
        return
    distances = [sign * (schema[key] - bound) for key in others if _is_number(schema.get(key))]
    if any(0 < distance < 1 for distance in distances):
        inside = math.nextafter(bound, sign * math.inf) if bound else sign * _NEAR_ZERO
        given = schema.get(inclusive)
        schema[inclusive] = sign * max(sign * given, sign * inside) if _is_number(given) else inside
        del schema[exclusive]

"""Bounds what a chat template computes: its loops and macros count steps, and products have a size. Router process, any thread.

Jinja's sandbox keeps a template from the process, but lets it run for ever.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.sandbox

STEP = "kvrelay_step"
"""The variable that a rendering needs: a new `Steps`."""
_MAX_STEPS = 1_000_000
"""A conversation of 4 MB has fewer than 100,000 messages."""
_MAX_PRODUCT, _MAX_EXPONENT = 2**24, 64


class Steps:
    """Counts the steps of one rendering. Raises: jinja2.TemplateError beyond the limit."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateError(f"it takes more than {_MAX_STEPS:,} steps")


def count_steps(template: jinja2.nodes.Template) -> None:
    """Have each iteration of a loop and each call of a macro in a parsed template count as a step."""
    for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
        call = jinja2.nodes.Call(jinja2.nodes.Name(STEP, "load"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, with bounded products and powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (not isinstance(right, int) or abs(right) > _MAX_EXPONENT):
            raise jinja2.TemplateError(f"an exponent is no integer up to {_MAX_EXPONENT}")
        for repeated, count in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(repeated, str | list | tuple) and len(cast("Sized", repeated)) * int(count) > _MAX_PRODUCT:
                raise jinja2.TemplateError(f"a product has more than {_MAX_PRODUCT:,} items")
        return super().call_binop(context, operator, left, right)

"""The options that say what to send, shared by the commands of `kvrelay load`: each is a field of `LoadPlan`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from common.base.errors import ConfigError
from kvrelay.load.plan import MAX_SEED, LoadPlan
from kvrelay.served_models import default_url

_DEFAULTS: dict[str, Any] = {"url": None, "model": "", "vocab_size": 0, "seed": None}
"""Defaults that differ from `LoadPlan`'s: the server is asked for these, and the seed is drawn."""


def takes_plan(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn `function(plan, ...)` into a command whose options are the fields of `LoadPlan`, then its own.

    `without`: the fields that the command sets itself. A plan that contradicts itself is wrong usage.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            fields: dict[str, Any] = {parameter.name: given.pop(parameter.name) for parameter in shared}
            fields["url"] = fields["url"] or default_url()
            if fields["seed"] is None:
                fields["seed"] = secrets.randbelow(MAX_SEED)
            function(LoadPlan(**fields), **given)

        kinds = typing.get_type_hints(LoadPlan)
        options = [field for field in dataclasses.fields(LoadPlan) if field.metadata and field.name not in without]
        shared = [_parameter(field, kinds[field.name]) for field in options]
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "plan"
        ]
        command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*shared, *own]}
        return command

    return wrap


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    """A field of `LoadPlan` as a parameter of a command."""
    default = _DEFAULTS.get(field.name, field.default)
    options: dict[str, Any] = {"flag": "--" + field.name.removesuffix("_s").replace("_", "-"), **field.metadata}
    option = typer.Option(options.pop("flag"), **options)
    annotation = Annotated[kind | None if default is None else kind, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def check_usage(plan: LoadPlan) -> None:
    """Raises: typer.BadParameter for a plan that contradicts itself."""
    try:
        plan.check()
    except ConfigError as error:
        raise typer.BadParameter(error.message) from None

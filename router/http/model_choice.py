"""Which model a call uses: the named one, if it does what the call needs. Pure."""

from __future__ import annotations

from common.base.errors import BadRequest
from common.control.messages import Task
from router.models.catalog import ModelCatalog
from router.models.served_model import ServedModel

_DOES = {"generate": "generates text", "embed": "embeds texts", "score": "scores pairs of texts"}


def model_for(catalog: ModelCatalog, name: str | None, *tasks: Task) -> ServedModel:
    """The model `name`, which must do one of `tasks`; without a name or with an empty one, as `ModelCatalog.default`.

    Raises: NotFound, Unavailable; BadRequest for a model that does something else, with those that would do.
    """
    model = catalog.get(name) if name else catalog.default(*tasks)
    if model.task in tasks:
        return model
    wanted = " or ".join(_DOES[task] for task in tasks)
    names = ", ".join(repr(each.name) for each in catalog.models if each.task in tasks)
    raise BadRequest(
        f"the model {model.name!r} {_DOES[model.task]}; this call needs one that {wanted}: "
        + (names or "this server has none"),
        param="model",
        code="wrong_model",
    )

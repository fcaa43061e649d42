"""Models in Anthropic's shape, for the clients that send its header on the paths that OpenAI's clients use too. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from starlette.types import Scope

from router.http.anthropic.answer_types import AnthropicModel, AnthropicModelList
from router.http.request_headers import header
from router.models.served_model import ServedModel


def is_of_anthropic(scope: Scope) -> bool:
    """Whether a request comes from an Anthropic client, which always sends the version of the API."""
    return header(scope, b"anthropic-version") != ""


def model_info(model: ServedModel, created_s: int) -> AnthropicModel:
    """One model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def model_page(models: Sequence[ServedModel], created_s: int) -> AnthropicModelList:
    """All models on one page, regardless of `limit`: clients ask for no further page if `has_more` is false."""
    return {
        "data": [model_info(model, created_s) for model in models],
        "has_more": False,
        "first_id": models[0].name if models else None,
        "last_id": models[-1].name if models else None,
    }

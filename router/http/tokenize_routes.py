"""`/tokenize` and `/detokenize`, as vLLM has them. Runs on the router's event loop; long texts on a thread."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, FailFast, Field
from starlette.responses import Response

from common.base.errors import BadRequest
from router.http.json_body import Json
from router.http.openai.build_request import chat_prompt
from router.http.openai.chat_request import ChatRequest
from router.http.openai.checks import MAX_INT
from router.http.openai.parse_body import completion_request, read_object, validated
from router.http.responses import JsonResponse
from router.http.serve import maybe_on_thread, read_and
from router.http.services import Services
from router.model_catalog import ServedModel


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    model: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeRequest(_Request):
    """Body of `POST /tokenize` with a prompt. With `messages` instead, all fields of a chat request apply that change its
    prompt, and `add_special_tokens` is false by default.
    """

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """Body of `POST /detokenize`."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], FailFast()]


_OF_TOKENIZE = TokenizeRequest.model_fields.keys() - {"model"}


def add_tokenize_routes(app: FastAPI, services: Services) -> None:
    """Add both to the application."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Token ids of a prompt or of a conversation."""
        body, size = await read_and(request, services, read_object)
        wanted = validated(body, TokenizeRequest)
        model = services.catalog.get(wanted.model)
        ids = await maybe_on_thread(size, lambda: _token_ids(body, wanted, model))
        strs = [model.tokenizer.token_str(token_id) for token_id in ids] if wanted.return_token_strs else None
        shown: Json = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strs}
        return JsonResponse(shown)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The text of token ids, with its special tokens."""
        body, size = await read_and(request, services, lambda data: validated(read_object(data), DetokenizeRequest))
        model = services.catalog.get(body.model)
        if any(token_id >= model.vocab_size for token_id in body.tokens):
            raise BadRequest(f"token ids must be below {model.vocab_size}", param="tokens")
        text = await maybe_on_thread(size, lambda: model.tokenizer.decode(body.tokens))
        return JsonResponse({"prompt": text})


def _token_ids(body: dict[str, Any], wanted: TokenizeRequest, model: ServedModel) -> list[int]:
    if (wanted.prompt is None) == (body.get("messages") is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if wanted.prompt is not None:
        special = wanted.add_special_tokens is not False
        return model.tokenizer.encode(wanted.prompt, add_special_tokens=special)
    chat = {name: value for name, value in body.items() if name not in _OF_TOKENIZE}
    text = chat_prompt(completion_request(chat, ChatRequest), model)
    return model.tokenizer.encode(text, add_special_tokens=bool(wanted.add_special_tokens))

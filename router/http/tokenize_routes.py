"""`/tokenize` and `/detokenize`, as vLLM has them. Runs on the router's event loop; long texts on a thread."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from common.base.errors import BadRequest, NotFound
from common.model.added_tokens import read_if_there
from router.http.answer_types import Prompt, TokenizerInfo, Tokens
from router.http.body_model import BodyModel
from router.http.json_body import Json, large_json
from router.http.openai.build_request import chat_prompt
from router.http.openai.chat_request import ChatRequest
from router.http.openai.checks import TokenId, as_object
from router.http.openai.parse_body import completion_request, validated
from router.http.openapi import OF_BODIES, described
from router.http.responses import JsonResponse
from router.http.serve import parse_as, parse_by, warnings_of
from router.http.services import Services
from router.models.served_model import ServedModel


class _Request(BodyModel):
    model: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeRequest(_Request):
    """Body of `POST /tokenize` with a prompt."""

    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatRequest):
    """Body of `POST /tokenize` with a conversation: the fields that do not change its prompt have no effect."""

    add_special_tokens: bool | None = False
    return_token_strs: bool | None = False


class DetokenizeRequest(_Request):
    """Body of `POST /detokenize`."""

    tokens: list[TokenId]


def add_tokenize_routes(app: FastAPI, services: Services) -> None:
    """Add them to the application."""

    @app.post(
        "/tokenize", openapi_extra=described(Tokens, body=TokenizeRequest | TokenizeChatRequest, errors=OF_BODIES)
    )
    async def tokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Token ids of a prompt or of a conversation."""
        body, size = await parse_by(request, services, _kind_of, _tokenize_request)
        model = services.catalog.get(body.model)
        shown = await services.body_work.run(request, size, lambda: large_json(_tokens(body, model)))
        return JsonResponse(shown, headers=warnings_of(request))

    @app.post("/detokenize", openapi_extra=described(Prompt, body=DetokenizeRequest, errors=OF_BODIES))
    async def detokenize(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The text of token ids, with its special tokens."""
        body, size = await parse_as(request, services, DetokenizeRequest, validated)
        model = services.catalog.get(body.model)
        if any(token_id >= model.vocab_size for token_id in body.tokens):
            raise BadRequest(f"token ids must be below {model.vocab_size}", param="tokens")
        text = await services.body_work.run(request, size, lambda: model.tokenizer.decode(body.tokens))
        return JsonResponse({"prompt": text}, headers=warnings_of(request))

    @app.get("/tokenizer_info", openapi_extra=described(TokenizerInfo, errors=(404, 503)))
    async def tokenizer_info(model: str | None = None) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The tokenizer's configuration and the chat template, if the router shows them (`--enable-tokenizer-info-endpoint`)."""
        if not services.options.enable_tokenizer_info_endpoint:
            raise NotFound("this router does not show its tokenizer; --enable-tokenizer-info-endpoint lets it")
        found = services.catalog.get(model)
        return JsonResponse(await asyncio.to_thread(_tokenizer_info, found))


def _tokenizer_info(model: ServedModel) -> Json:
    """tokenizer_config.json without objects that say how tokens are stripped, and the template that is used."""
    config = read_if_there(model.folder / "tokenizer_config.json")
    shown: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    named = {key: fields["content"] for key, value in shown.items() if "content" in (fields := as_object(value) or {})}
    template = model.tokenizer.template_source
    return {**shown, **named, **({"chat_template": template} if template else {})}


def _kind_of(fields: Json) -> type[TokenizeRequest] | type[TokenizeChatRequest]:
    if ("prompt" in fields) == ("messages" in fields):
        raise BadRequest("give either prompt or messages", param="prompt")
    return TokenizeRequest if "prompt" in fields else TokenizeChatRequest


def _tokenize_request(
    fields: Json, kind: type[TokenizeRequest | TokenizeChatRequest]
) -> TokenizeRequest | TokenizeChatRequest:
    return completion_request(fields, kind) if issubclass(kind, TokenizeChatRequest) else validated(fields, kind)


def _tokens(body: TokenizeRequest | TokenizeChatRequest, model: ServedModel) -> Json:
    special, strs = bool(body.add_special_tokens), None
    if isinstance(body, TokenizeRequest):
        ids = model.tokenizer.encode(body.prompt, add_special_tokens=special)
    else:
        ids = model.tokenizer.encode_chat(chat_prompt(body, model).text, add_special_tokens=special)
    if body.return_token_strs:
        token_str = lru_cache(model.vocab_size)(model.tokenizer.token_str)  # equal tokens share one string
        strs = [token_str(token_id) for token_id in ids]
    return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strs}

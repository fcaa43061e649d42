"""The options of the HTTP API's clients. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.config.fields import option

GenerationConfig = Literal["auto", "none"]


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of the HTTP API's clients."""

    api_key: str = option("", "Clients' keys, separated by commas; empty accepts every client.", "Clients", secret=True)
    api_key_file: str | None = option(
        None, "TOML file of keys in classes with limits (docs/security.md), read again when it changes.", "Clients"
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template, used instead of the model's own.", "Clients"
    )
    fit_conversations: bool = option(
        True,
        "Change conversations whose sequence of roles the chat template does not take: join leading system messages, carry "
        "later ones into the user's turns, merge neighbours of one role; the header x-kvrelay-fitted says so.",
        "Clients",
    )
    tool_call_parser: str | None = option(
        None,
        "Format of the model's tool calls, by the names of docs/tools.md (hermes, qwen3_coder, mistral, ...), or none: tools "
        "are refused; by default chosen from the chat template.",
        "Clients",
    )
    reasoning_parser: str | None = option(
        None,
        "Format of the model's reasoning, by the names of docs/tools.md (qwen3, deepseek_r1, mistral, ...), or none; by "
        "default chosen from the chat template.",
        "Clients",
    )
    generation_config: GenerationConfig = option(
        "auto",
        "Defaults of temperature, top_p, top_k, min_p, repetition_penalty and the answer's length: auto reads the "
        "model's generation_config.json, none uses OpenAI's defaults.",
        "Clients",
    )
    request_timeout_s: float = option(
        600.0, "Seconds after which an unfinished request is aborted.", "Clients", low=0.001
    )
    stream_ping_s: float = option(
        15.0,
        "A stream that has nothing to send for this many seconds sends its headers and a comment, so that proxies keep it; "
        "later errors come in the stream. 0: never.",
        "Clients",
        low=0,
    )
    max_waiting: int = option(
        256, "Maximum number of a model's requests without a first token; further ones get 429.", "Clients", low=1
    )
    max_queue_wait_s: float = option(
        60.0, "Seconds that a request may wait in the router's admission queue before it gets 429.", "Clients", low=0
    )
    slo_ttft: float = option(
        0.0,
        "Reject a request early (429) if its first token is expected to take longer than this many seconds; 0: never.",
        "Clients",
        low=0,
    )
    slo_tpot: float = option(
        0.0,
        "Reject a request early (429) if each token is expected to take longer than this many seconds; 0: never.",
        "Clients",
        low=0,
    )
    max_stored_responses: int = option(
        1000,
        "Maximum number of answers of /v1/responses that Redis keeps for each API key, or for all clients together where there are "
        "no keys; each of at most 256 KiB and for a day; 0: none.",
        "Clients",
        low=0,
    )
    allow_runtime_lora: bool = option(
        False,
        "Let clients load LoRA adapters from --lora-dir with /v1/load_lora_adapter, and unload theirs with "
        "/v1/unload_lora_adapter; needs an admin token.",
        "Clients",
    )
    lora_dir: str | None = option(
        None, "Folder of the LoRA adapters that clients may load, as the nodes see it.", "Clients"
    )
    strict_parameters: bool = option(
        False,
        "Refuse requests with fields that no known API has (400); by default these are ignored and named in the "
        "x-kvrelay-ignored header.",
        "Clients",
    )
    allowed_hosts: str = option(
        "",
        "Host names by which clients address the router while there are no API keys, beside IP addresses, localhost and this "
        "host's own name; * allows all.",
        "Clients",
        several=True,
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "Name tokens in log-probabilities `token_id:N`, unless a request says otherwise.",
        "Clients",
    )
    max_logprobs: int = option(
        20,
        "Maximum number of most likely tokens whose log-probabilities a request may ask for; -1 allows the whole vocabulary.",
        "Clients",
        low=-1,
    )
    enable_force_include_usage: bool = option(
        False, "End every stream with its usage, as if each request had set stream_options.include_usage.", "Clients"
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Show the tokenizer's configuration and the chat template at /tokenizer_info.", "Clients"
    )
    root_path: str = option(
        "", "Path under which a proxy shows this router, such as /llm; requests may have it or not.", "Clients"
    )
    allowed_origins: str = option(
        "",
        "Origins of web pages whose scripts may use the API (CORS); * allows all, by default none may.",
        "Clients",
        several=True,
    )
    allowed_methods: str = option("*", "HTTP methods that such scripts may use.", "Clients", several=True)
    allowed_headers: str = option("*", "Request headers that such scripts may set.", "Clients", several=True)
    allow_credentials: bool = option(False, "Whether such scripts may send cookies.", "Clients")

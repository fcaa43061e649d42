"""Options of routers: for the HTTP API's clients, for the choice of nodes, and for planning their numbers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.config.fields import option

GenerationConfig = Literal["auto", "none"]
PlannerMode = Literal["off", "advise", "apply", "publish"]

_client_option, _routing_option, _planner_option = (
    partial(option, group=group) for group in ("Clients", "Routing", "Planner")
)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of the HTTP API's clients."""

    api_key: str = _client_option("", "Clients' keys, separated by commas; empty accepts every client.", secret=True)
    api_key_file: str | None = _client_option(
        None, "TOML file of keys in classes with limits (docs/security.md), read again when it changes."
    )
    chat_template: str | None = _client_option(
        None, "File with a Jinja chat template, used instead of the model's own."
    )
    fit_conversations: bool = _client_option(
        True,
        "Change conversations whose sequence of roles the chat template does not take: join leading system messages, carry "
        "later ones into the user's turns, merge neighbours of one role; the header x-kvrelay-fitted says so.",
    )
    tool_call_parser: str | None = _client_option(
        None,
        "Format of the model's tool calls, by the names of docs/tools.md (hermes, qwen3_coder, mistral, ...), or none: tools "
        "are refused; by default chosen from the chat template.",
    )
    reasoning_parser: str | None = _client_option(
        None,
        "Format of the model's reasoning, by the names of docs/tools.md (qwen3, deepseek_r1, mistral, ...), or none; by "
        "default chosen from the chat template.",
    )
    generation_config: GenerationConfig = _client_option(
        "auto",
        "Defaults of temperature, top_p, top_k, min_p, repetition_penalty and the answer's length: auto reads the "
        "model's generation_config.json, none uses OpenAI's defaults.",
    )
    request_timeout_s: float = _client_option(600.0, "Seconds after which an unfinished request is aborted.", low=0.001)
    stream_ping_s: float = _client_option(
        15.0,
        "A stream that has nothing to send for this many seconds sends its headers and a comment, so that proxies keep it; "
        "later errors come in the stream. 0: never.",
        low=0,
    )
    max_waiting: int = _client_option(
        256, "Maximum number of a model's requests without a first token; further ones get 429.", low=1
    )
    max_queue_wait_s: float = _client_option(
        60.0, "Seconds that a request may wait in the router's admission queue before it gets 429.", low=0
    )
    slo_ttft: float = _client_option(
        0.0,
        "Reject a request early (429) if its first token is expected to take longer than this many seconds; 0: never.",
        low=0,
    )
    slo_tpot: float = _client_option(
        0.0,
        "Reject a request early (429) if each token is expected to take longer than this many seconds; 0: never.",
        low=0,
    )
    max_stored_responses: int = _client_option(
        1000,
        "Maximum number of answers of /v1/responses that Redis keeps for each API key, or for all clients together where there are "
        "no keys; each of at most 256 KiB and for a day; 0: none.",
        low=0,
    )
    allow_runtime_lora: bool = _client_option(
        False,
        "Let clients load LoRA adapters from --lora-dir with /v1/load_lora_adapter, and unload theirs with "
        "/v1/unload_lora_adapter; needs an admin token.",
    )
    lora_dir: str | None = _client_option(
        None, "Folder of the LoRA adapters that clients may load, as the nodes see it."
    )
    strict_parameters: bool = _client_option(
        False,
        "Refuse requests with fields that no known API has (400); by default these are ignored and named in the "
        "x-kvrelay-ignored header.",
    )
    allowed_hosts: str = _client_option(
        "",
        "Host names by which clients address the router while there are no API keys, beside IP addresses, localhost and this "
        "host's own name; * allows all.",
        several=True,
    )
    return_tokens_as_token_ids: bool = _client_option(
        False, "Name tokens in log-probabilities `token_id:N`, unless a request says otherwise."
    )
    max_logprobs: int = _client_option(
        20,
        "Maximum number of most likely tokens whose log-probabilities a request may ask for; -1 allows the whole vocabulary.",
        low=-1,
    )
    enable_force_include_usage: bool = _client_option(
        False, "End every stream with its usage, as if each request had set stream_options.include_usage."
    )
    enable_tokenizer_info_endpoint: bool = _client_option(
        False, "Show the tokenizer's configuration and the chat template at /tokenizer_info."
    )
    root_path: str = _client_option(
        "", "Path under which a proxy shows this router, such as /llm; requests may have it or not."
    )
    allowed_origins: str = _client_option(
        "",
        "Origins of web pages whose scripts may use the API (CORS); * allows all, by default none may.",
        several=True,
    )
    allowed_methods: str = _client_option("*", "HTTP methods that such scripts may use.", several=True)
    allowed_headers: str = _client_option("*", "Request headers that such scripts may set.", several=True)
    allow_credentials: bool = _client_option(False, "Whether such scripts may send cookies.")


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """How a router chooses nodes."""

    local_prefill_tokens: int | None = _routing_option(
        None,
        "The decode node itself prefills prompts with at most this many uncached tokens; by default kv_aware decides "
        "by its estimates, and the other policies use 32.",
        low=0,
    )
    policy: str = _routing_option(
        "kv_aware", "Policy that chooses nodes: kv_aware, least_load, round_robin, random, power_of_two or session."
    )
    allow_mixed_weights: bool = _routing_option(
        False,
        "Use nodes whose weights, dtype, quantization or KV type differ from those of the model's older nodes, to replace one "
        "by the other without a pause: meanwhile requests are answered by either. By default such nodes are refused.",
    )
    max_attempts: int = _routing_option(3, "Consecutive attempts without a token before a request fails.", low=1)
    index_blocks: int = _routing_option(
        10_000_000,
        "Maximum number of blocks in the router's prefix index, about 60 bytes each; the least recently used are "
        "evicted first.",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How a router plans the numbers of nodes (docs/planner.md)."""

    planner: PlannerMode = _planner_option(
        "off",
        "Plan how many prefill and decode nodes the load needs: advise shows it (`kvrelay admin plan`), apply also changes the "
        "numbers that `kvrelay up` keeps: on one machine nodes trade roles, with --on ray they come and go. publish makes "
        "them metrics, by which an autoscaler such as that of Kubernetes scales. One of the cluster's routers plans.",
    )
    planner_max_nodes: int | None = _planner_option(
        None,
        "Maximum number of nodes of both roles together that the planner may want; by default it changes only the split of "
        "those there are, as always on one machine.",
        low=2,
    )

"""What `kvrelay serve` does with each option of vLLM's command line: a table, and how values are converted. Pure.

An option that is not here and not one of `kvrelay up` is unknown. docs/vllm-options.md shows the table (`page`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.config.fields import field_infos
from common.config.service_configs import UpConfig

Convert = Callable[[list[str]], list[str]]

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def renamed(*flags: str) -> Convert:
    """The same value under these names."""
    return lambda values: [word for flag in flags for word in (flag, values[0])]


def table_of(flag: str, **values: str) -> Convert:
    """`flag` with a value that is spelt in another way here; values that are not in the table stay."""
    return lambda given: [flag, values.get(given[0], given[0])]


def human_number(*flags: str, divisor: float = 0) -> Convert:
    """A number such as 8192, 8k (8000) or 8K (8192), divided by `divisor` if there is one."""

    def convert(values: list[str]) -> list[str]:
        number = _plain(values[0])
        if divisor and number.isdecimal():
            number = f"{int(number) / divisor:.9g}"
        return [word for flag in flags for word in (flag, number)]

    return convert


def optional_number(flag: str) -> Convert:
    """The same, where `auto` or -1 asks for the default."""
    return lambda values: [flag, "none" if values[0] in ("auto", "-1") else _plain(values[0])]


def lora_module(values: list[str]) -> list[str]:
    """`--lora` with adapters as NAME=FOLDER; JSON objects have `name` and `path`, and so have those in a list.

    Raises: ValueError with a sentence.
    """
    modules: list[str] = []
    for value in values:
        if not value.lstrip().startswith(("{", "[")):
            modules.append(value)
            continue
        try:
            found: Any = json.loads(value)
        except ValueError:
            raise ValueError(f"{value!r} is not valid JSON") from None
        for each in cast("list[Any]", found if isinstance(found, list) else [found]):
            if not isinstance(each, dict) or not {"name", "path"} <= cast("dict[str, Any]", each).keys():
                raise ValueError(f"{value!r} must be an object with name and path")
            modules.append(f"{each['name']}={each['path']}")
    return ["--lora", *modules]


def _plain(value: str) -> str:
    found = _HUMAN.fullmatch(value)
    return value if found is None else str(int(float(found[1]) * _UNITS[found[2]]))


Does = Literal["same", "becomes", "ignored", "refused"]
Arity = Literal["switch", "value", "values"]


@dataclass(frozen=True)
class VllmOption:
    """What one option of vLLM becomes."""

    does: Does
    says: str
    """Part of a sentence, for users: what holds here, or what to use instead."""
    arity: Arity = "value"
    """How many words follow it; `values`: all up to the next option."""
    neutral: tuple[str, ...] = ()
    """Values of a refused option that ask for what is so anyway."""
    convert: Convert = lambda _: []
    """Our words for its values. Raises: ValueError with a sentence."""


def _becomes(says: str, convert: Convert, arity: Arity = "value") -> VllmOption:
    return VllmOption("becomes", says, arity, convert=convert)


_IGNORED: Mapping[str, str] = {
    # why it has no effect -> names; ? marks a switch, * a list
    "prefix caching is always on": "enable-prefix-caching?",
    "blocks are named by SHA-256": "prefix-caching-hash-algo",
    "prompts are always computed in chunks, beside running streams": "enable-chunked-prefill? max-num-partial-prefills "
    "max-long-partial-prefills long-prefill-token-threshold enable-chunked-prefill-with-mm? max-num-scheduled-tokens "
    "scheduler-reserve-full-isl?",
    "tools are on wherever the model has a format for them": "enable-auto-tool-choice? enable-reasoning?",
    "with tool_choice none the prompt has no tools": "exclude-tools-when-tool-choice-none?",
    "adapters are served where --lora names some": "enable-lora? lora-extra-vocab-size enable-lora-bias?",
    "adapters are split over ranks as the layers are, and stay on the node's device": "fully-sharded-loras? max-cpu-loras "
    "lora-dtype specialize-active-lora?",
    "code from a model's folder is never run": "trust-remote-code? code-revision",
    "the tokenizer is that of tokenizer.json, and of the model's revision": "tokenizer-mode tokenizer-revision "
    "skip-tokenizer-init? tokenizer-pool-size renderer-num-workers",
    "priorities of requests always count": "scheduling-policy",
    "the engine schedules in one loop, and sends each token at once": "num-scheduler-steps num-lookahead-slots "
    "multi-step-stream-outputs? stream-interval disable-async-output-proc? preemption-mode scheduler-delay-factor "
    "use-v2-block-manager? kv-sharing-fast-prefill? aggregate-engine-logging? disable-hybrid-kv-cache-manager?",
    "--speculate ngram finds the length itself": "ngram-prompt-lookup-max ngram-prompt-lookup-min",
    "kernels are chosen for the device, and CUDA graphs for the batch sizes that occur": "attention-backend "
    "attention-config kernel-config moe-backend compilation-config optimization-level performance-mode cudagraph-capture-sizes* "
    "cuda-graph-sizes* max-cudagraph-capture-size max-seq-len-to-capture disable-cascade-attn? disable-custom-all-reduce? "
    "enable-flashinfer-autotune? mla-backend override-attention-dtype",
    "grammars are llguidance's": "guided-decoding-backend structured-outputs-config guided-decoding-disable-fallback? "
    "guided-decoding-disable-any-whitespace? guided-decoding-disable-additional-properties?",
    "ranks are processes that kvrelay starts itself": "distributed-executor-backend worker-cls worker-extension-cls "
    "ray-workers-use-nsight? worker-use-ray? max-parallel-loading-workers distributed-timeout-seconds",
    "prompts and answers are never logged; kvrelay admin request shows a request's way": "enable-log-requests? "
    "disable-log-requests? enable-log-outputs? enable-log-deltas? max-log-len disable-uvicorn-access-log? log-error-stack? "
    "disable-access-log-for-endpoints disable-log-stats? enable-logging-iteration-details?",
    "GET /metrics always has all metrics": "show-hidden-metrics-for-version kv-cache-metrics? kv-cache-metrics-sample "
    "cudagraph-metrics? enable-mfu-metrics? enable-mm-processor-stats? enable-server-load-tracking? "
    "enable-per-request-metrics?",
    "traces have all parts of a request": "collect-detailed-traces*",
    "Ctrl-C ends requests and services in order": "shutdown-timeout",
    "usage always has prompt_tokens_details": "enable-prompt-tokens-details?",
    "every answer has x-request-id": "enable-request-id-headers?",
    "images, audio and video are not served": "limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
    "mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend skip-mm-profiling? "
    "interleave-mm-strings? enable-mm-embeds? video-pruning-rate allowed-local-media-path allowed-media-domains* "
    "disable-mm-preprocessor-cache? disable-chunked-mm-input? language-model-only? enable-tower-connector-lora? "
    "default-mm-loras",
    "weights are read by each rank, its own part": "safetensors-load-strategy use-tqdm-on-load? pt-load-map-location "
    "model-loader-extra-config",
    "messages are passed to the template in the form that it takes": "chat-template-content-format",
    "no recurrent state is kept": "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode",
    "experts are split over tensor-parallel ranks like other layers": "enable-expert-parallel? all2all-backend "
    "expert-placement-strategy",
    "CPU memory holds no KV of a GPU": "swap-space",
    "scales of FP8 KV are those of the checkpoint, else 1": "calculate-kv-scales?",
    "answers have no system_fingerprint": "fingerprint-mode fingerprint-value",
    "the certificate's files are read again when they change": "enable-ssl-refresh?",
    "headers and bodies have limits (--max-body-mb)": "h11-max-incomplete-event-size h11-max-header-count",
    "only the call of Cohere has it": "cohere-is-reasoning-model? cohere-format",
}
"""Options that ask for what is so anyway, or that only another design needs."""

_REFUSED: Mapping[str, str] = {
    # what to use instead -> names, with values that are taken in parentheses
    "prefix caching cannot be switched off; requests with a cache_salt of their own share nothing": "no-enable-prefix-caching?",
    "kvrelay serve starts prefill and decode nodes that relay KV; on other hosts start kvrelay prefill and kvrelay decode": (
        "kv-transfer-config ec-transfer-config weight-transfer-config"
    ),
    "start ranks on several hosts with kvrelay prefill and kvrelay decode, which have these options": "nnodes(1) node-rank(0) "
    "master-addr master-port headless?",
    "other hosts start kvrelay decode with the same --redis-url": "data-parallel-rank data-parallel-start-rank "
    "data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend(mp) data-parallel-hybrid-lb? "
    "data-parallel-external-lb? data-parallel-multi-port-external-lb? data-parallel-supervisor-port",
    "whole blocks of a context are split over ranks": "dcp-kv-cache-interleave-size(1) cp-kv-cache-interleave-size(1) "
    "dcp-comm-backend",
    "--rebalance-experts and --redundant-experts move and copy experts": "enable-eplb? eplb-config num-redundant-experts(0)",
    "the number of a node's ranks is fixed, and a step is one batch": "enable-elastic-ep? enable-dbo?",
    "blocks have 16 tokens": "block-size(16)",
    "weights and KV stay on the node's device": "cpu-offload-gb(0) offload-backend kv-offloading-size kv-offloading-backend",
    "set the variable HF_HUB_CACHE": "download-dir",
    "set the variable HF_TOKEN": "hf-token",
    "change the files in a copy of the model's folder": "hf-overrides hf-config-path rope-scaling rope-theta config-format(auto) "
    "pooler-config override-pooler-config disable-sliding-window?",
    "put them into generation_config.json of the model's folder, or into requests": "override-generation-config",
    "requests have logit_bias, bad_words and allowed_token_ids": "logits-processors* logits-processor-pattern",
    "log-probabilities are of the distribution before temperature": "logprobs-mode(raw_logprobs)",
    "send prompts as text or token ids": "enable-prompt-embeds?",
    "the formats are built in (--tool-call-parser, --reasoning-parser)": "tool-parser-plugin reasoning-parser-plugin "
    "io-processor-plugin",
    "tools are called by clients": "tool-server",
    "give the template to --chat-template": "trust-request-chat-template?",
    "requests have chat_template_kwargs, or give a template with these values to --chat-template": "default-chat-template-kwargs",
    "answers have the role assistant": "response-role(assistant)",
    "give --speculate, such as suffix, mtp, eagle:PATH or draft:MODEL": "speculative-model spec-model spec-method",
    "put a proxy in front of it, or use --host and --port": "uds middleware grpc?",
    "--ssl-certfile and --ssl-keyfile are enough for HTTPS; clients have keys (--api-key)": "ssl-ca-certs ssl-cert-reqs(0) "
    "ssl-ciphers",
    "with --api-key the documentation needs a key too": "disable-fastapi-docs? enable-offline-docs?",
    "logs have the forms of --log-format": "log-config-file",
    "set the variable KVRELAY_OTLP_TRACES_ENDPOINT": "otlp-traces-endpoint",
    "kvrelay admin profile records steps": "profiler-config enable-layerwise-nvtx-tracing?",
    "KV events are in Redis (docs/redis.md)": "kv-events-config",
    "stop the nodes instead": "enable-sleep-mode?",
    "it belongs to vLLM's own engine": "scheduler-cls additional-config ignore-patterns* tokens-only? ubatch-size",
    "--routers starts several, on consecutive ports": "api-server-count(1)",
}
"""Options whose effect cannot be had, or is had in another way."""

_PARALLEL = "--prefill-tp and --decode-tp"

_BECOMES: Mapping[str, VllmOption] = {
    "tensor-parallel-size": _becomes(_PARALLEL, renamed("--prefill-tp", "--decode-tp")),
    "pipeline-parallel-size": _becomes("--decode-pp; prefill nodes have no stages", renamed("--decode-pp")),
    "prefill-context-parallel-size": _becomes("--prefill-context-parallel", renamed("--prefill-context-parallel")),
    "decode-context-parallel-size": _becomes(
        "--decode-context-parallel: as many times the ranks, where vLLM divides those of --tensor-parallel-size",
        renamed("--decode-context-parallel"),
    ),
    "data-parallel-size": _becomes("--decode: as many decode nodes", renamed("--decode")),
    "max-num-batched-tokens": _becomes(
        "--prefill-max-num-batched-tokens and --decode-max-num-batched-tokens",
        human_number("--prefill-max-num-batched-tokens", "--decode-max-num-batched-tokens"),
    ),
    "max-num-seqs": _becomes("the same; 1k means 1000", human_number("--max-num-seqs")),
    "max-model-len": _becomes(
        "the same; 32k means 32000, 32K 32768; auto and -1 mean the default", optional_number("--max-model-len")
    ),
    "kv-cache-memory-bytes": _becomes("--kv-memory-gb", human_number("--kv-memory-gb", divisor=1e9)),
    "num-gpu-blocks-override": _becomes("--kv-blocks", renamed("--kv-blocks")),
    "seed": _becomes("the same, for dummy weights; requests have seeds of their own", renamed("--seed")),
    "dtype": _becomes(
        "the same; half is float16, float is float32", table_of("--dtype", half="float16", float="float32")
    ),
    "quantization": _becomes(
        "the same; the name of a checkpoint's format (awq, gptq, ...) is auto, because checkpoints declare it",
        table_of(
            "--quantization",
            **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "mxfp4", "modelopt", "none"), "auto"),
            **{"compressed-tensors": "auto"},
        ),
    ),
    "load-format": _becomes(
        "the same; formats of files are auto",
        table_of(
            "--load-format",
            **dict.fromkeys(("safetensors", "pt", "hf", "gguf", "fastsafetensors", "instanttensor"), "auto"),
        ),
    ),
    "model-impl": _becomes("the same; vllm is native", table_of("--model-impl", vllm="native")),
    "task": _becomes("the same; embedding is embed", table_of("--task", embedding="embed")),
    "runner": _becomes(
        "--task; pooling is auto: embed or score by the model's class",
        table_of("--task", pooling="auto", generate="generate"),
    ),
    "convert": _becomes("--task", table_of("--task", none="auto", embed="embed", auto="auto")),
    "generation-config": _becomes("the same; vllm is none", table_of("--generation-config", vllm="none")),
    "uvicorn-log-level": _becomes("--log-level", table_of("--log-level", critical="error", trace="debug")),
    "lora-modules": _becomes("--lora, also from JSON with name and path", lora_module, "values"),
    "api-key": _becomes("the same; several keys", lambda keys: ["--api-key", ",".join(keys)], "values"),
    "speculative-config": _becomes("--speculate, which takes the same JSON", renamed("--speculate")),
    "num-speculative-tokens": _becomes("--speculate-tokens", renamed("--speculate-tokens")),
    "spec-tokens": _becomes("--speculate-tokens", renamed("--speculate-tokens")),
    "model": _becomes("MODEL, without a flag", lambda values: values),
    "revision": _becomes("`MODEL@REVISION`", lambda _: []),
}
"""`revision` has no words of its own: it is added to the model's name."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-O": "optimization-level",
    "-cc": "compilation-config",
    "-asc": "api-server-count",
    "-ac": "attention-config",
    "-ep": "enable-expert-parallel",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
}
"""Short names of vLLM's options."""

SAME = (
    "served-model-name tokenizer kv-cache-dtype enforce-eager async-scheduling gpu-memory-utilization max-loras "
    "max-lora-rank chat-template tool-call-parser reasoning-parser host port allow-credentials allowed-origins "
    "allowed-methods allowed-headers ssl-certfile ssl-keyfile config root-path max-logprobs "
    "return-tokens-as-token-ids enable-force-include-usage enable-tokenizer-info-endpoint"
)
"""Options that mean the same here."""


def _entries(does: Does, groups: Mapping[str, str]) -> Iterator[tuple[str, VllmOption]]:
    for says, names in groups.items():
        for word in names.split():
            name, _, neutral = word.rstrip(")?*").partition("(")
            arity: Arity = "switch" if word.endswith("?") else "values" if word.endswith("*") else "value"
            yield name, VllmOption(does, says, arity, (neutral,) if neutral else ())


def _table() -> dict[str, VllmOption]:
    ours = {name.replace("_", "-") for name in field_infos(UpConfig)}
    table = {**dict(_entries("ignored", _IGNORED)), **dict(_entries("refused", _REFUSED))}
    same = [*SAME.split(), *(name for name in table if name in ours)]
    return table | dict(_BECOMES) | {name: VllmOption("same", "the same") for name in same}


OPTIONS: Mapping[str, VllmOption] = _table()
"""By vLLM's name, without the dashes."""

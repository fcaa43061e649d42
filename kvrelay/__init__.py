"""Serving large language models with prefill and decode on separate nodes; offline, `from kvrelay import LLM`.

Each public name is imported when it is first used, so that the command `kvrelay` starts without what offline use needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.base.errors import BadRequest, ConfigError, KvRelayError
    from kvrelay.offline.llm import LLM
    from kvrelay.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from kvrelay.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BadRequest",
    "CompletionOutput",
    "ConfigError",
    "KvRelayError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]

_MODULES = {
    "LLM": "kvrelay.offline.llm",
    "BadRequest": "common.base.errors",
    "CompletionOutput": "kvrelay.offline.outputs",
    "ConfigError": "common.base.errors",
    "KvRelayError": "common.base.errors",
    "Logprob": "kvrelay.offline.outputs",
    "RequestOutput": "kvrelay.offline.outputs",
    "SamplingParams": "kvrelay.offline.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__

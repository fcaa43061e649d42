"""Offline use: `from kvrelay import LLM, SamplingParams`. Importing this package does not import torch."""

from common.base.errors import BadRequest, ConfigError, KvRelayError
from kvrelay.llm import LLM
from kvrelay.outputs import CompletionOutput, Logprob, RequestOutput
from kvrelay.sampling_params import SamplingParams

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

"""The native CPU kernels, loaded: their C interface (src/api.h) through ctypes, and this process's team of threads.

ctypes releases the GIL during every call. All calls but `scatter_rows` come from a rank's engine thread, one at a time.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

from common.base.errors import ConfigError
from common.base.variables import CPU_KERNELS

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
"""enum kv_dtype."""
FLOAT32, BFLOAT16, INT8, INT4, FP4 = range(5)
"""enum kv_format."""
SILU_GATE, CLAMPED_GATE = 1, 2
"""enum kv_gate_kind."""
SCORES = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
"""enum kv_scores."""
MAXIMA_OF = 128
"""KV_MAXIMA_OF."""

_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class LinearStruct(Structure):
    """struct kv_linear."""

    _fields_ = [
        *_fields(_I, "format", "out", "inputs", "group", "is_paired"),
        *_fields(_P, "weight", "scale", "zero", "bias"),
    ]


class GateStruct(Structure):
    """struct kv_gate."""

    _fields_ = [("kind", _I), ("alpha", _F), ("limit", _F)]


class ExpertsStruct(Structure):
    """struct kv_experts."""

    _fields_ = [
        *_fields(_P, "gate_up", "down", "slots", "replicas", "counts"),
        *_fields(_I, "first", "num_experts", "hidden", "inner", "slot_stride"),
        ("gate", GateStruct),
    ]


class ChoiceStruct(Structure):
    """struct kv_choice."""

    _fields_ = [("experts", _P), ("weights", _P), ("rows", _I), ("top_k", _I)]


class RouterStruct(Structure):
    """struct kv_router."""

    _fields_ = [
        ("logits", LinearStruct),
        ("selection_bias", _P),
        *_fields(_I, "scores", "num_experts", "top_k", "normalizes", "num_groups", "groups_kept", "group_score_of"),
        ("scaling", _F),
    ]


class MixtureStruct(Structure):
    """struct kv_mixture."""

    _fields_ = [
        ("router", RouterStruct),
        ("experts", ExpertsStruct),
        *_fields(LinearStruct, "shared_gate_up", "shared_down"),
    ]


class CacheStruct(Structure):
    """struct kv_cache."""

    _fields_ = [
        *_fields(_P, "k", "v"),
        *_fields(_I, "dtype", "kv_heads", "head_dim", "block_size"),
        *_fields(_F, "k_scale", "v_scale"),
        ("window", _I),
        ("soft_cap", _F),
        ("sinks", _P),
    ]


class BatchStruct(Structure):
    """struct kv_batch."""

    _fields_ = [
        *_fields(_I, "num_entries", "num_rows"),
        *_fields(_P, "first_rows", "context_lens", "first_blocks", "block_ids", "slots", "row_starts", "row_ends"),
        ("partial_dim", _I),
    ]


class LayerStruct(Structure):
    """struct kv_layer."""

    _fields_ = [
        *_fields(LinearStruct, "qkv", "output", "gate_up", "down"),
        *_fields(_P, "mixture", "input_norm", "mlp_norm", "head_norm"),
        *_fields(_F, "input_eps", "mlp_eps", "head_eps", "attention_scale"),
        *_fields(_I, "hidden", "q_heads", "kv_heads", "head_dim", "dtype"),
    ]


class LoraRunStruct(Structure):
    """struct kv_lora_run."""

    _fields_ = [("start", _I), ("stop", _I)]


class LoraTermStruct(Structure):
    """struct kv_lora_term."""

    _fields_ = [("a", _P), ("b", _P), ("scale", _F), *_fields(_I, "rank", "inputs", "out", "first", "run")]


class LoraStruct(Structure):
    """struct kv_lora."""

    _fields_ = [("runs", _P), ("terms", _P * 4), ("counts", _I * 4)]


class RotationStruct(Structure):
    """struct kv_rotation."""

    _fields_ = [("cos", _P), ("sin", _P), ("positions", _P)]


class ModelStruct(Structure):
    """struct kv_model."""

    _fields_ = [
        *_fields(_P, "layers", "caches", "batches", "embedding", "final_norm", "lm_head"),
        ("rotation", RotationStruct),
        ("num_layers", _I),
        ("final_eps", _F),
    ]


class DrawStruct(Structure):
    """struct kv_draw."""

    _fields_ = [("logits", _P), ("top", _F), ("temperature", _F), ("key", c_uint32 * 2)]


class NativeLibrary:
    """The kernels for this processor and the team of threads that runs them."""

    def __init__(self, path: Path, limit: str, threads: int) -> None:
        """`limit`: as `select` takes it. Raises: OSError, ConfigError."""
        self._library = ctypes.CDLL(str(path))
        self._best_variant = self._function("kv_best_variant", c_char_p, returns=c_char_p)
        self.check_batch = self._function("kv_check_batch", _P, _I, _I, returns=_I)
        self.scatter_rows = self._function("kv_scatter_rows", _P, _L, _I, _P, _I, _L, _P, _L)
        self.select(limit)
        self.threads = threads
        self.team: int | None = self._function("kv_team_new", _I, returns=_P)(threads)
        """struct kv_team, the first argument of every function that `select` sets."""
        if self.team is None:
            raise ConfigError(f"cannot start {threads} threads for the native kernels")

    def select(self, limit: str) -> str:
        """Use the best variant that this processor runs, at most `limit`: a value of `CPU_KERNELS`, "" for none. Returns its
        name. Raises: ConfigError.
        """
        chosen: bytes | None = self._best_variant(limit.encode())
        if chosen is None:
            raise ConfigError(f"{CPU_KERNELS}={limit!r} names no kernels that this processor runs")
        self.variant = chosen.decode()
        self.linear_forward = self._of_variant("linear_forward", _P, _P, _I, _L, _P, _I, _L, _I)
        self.heads_forward = self._of_variant("heads_forward", _P, _I, _P, _L, _L, _P, _L, _L, _I, _I)
        self.experts_forward = self._of_variant("experts_forward", _P, _P, _P, _I, _P)
        self.mixture_forward = self._of_variant("mixture_forward", _P, _P, _I, _I, _P)
        self.rotation_angles = self._of_variant("rotation_angles", _P, _I, _P, _I, _P, _P)
        self.attention_forward = self._of_variant("attention_forward", _P, _P, _I, _F, _I, _P, _L, _P, _L, _P, _L, _P)
        self.join_partials = self._of_variant("join_partials", _P, _I, _I, _I, _I, _P, _I, _P)
        self.layer_attend = self._of_variant("layer_attend", _P, _P, _P, _P, _P, _P, _P)
        self.layer_rows = self._of_variant("layer_rows", _P, _I, _P, _P, _P, _P, _P)
        self.layer_project = self._of_variant("layer_project", _P, _I, _P, _P, _P)
        self.layer_mlp = self._of_variant("layer_mlp", _P, _I, _P, _P, _P)
        self.layers_forward = self._of_variant("layers_forward", _I, _P, _P, _P, _P, _P, _P)
        self.model_forward = self._of_variant("model_forward", _P, _P, _P)
        self.lora_add = self._of_variant("lora_add", _P, _I, _P, _I, _P, _L, _P, _I, _L)
        self.silu_and_mul = self._of_variant("silu_and_mul", _P, _I, _I, _I, _P)
        self.norm = self._of_variant("norm", _P, _F, _I, _I, _I, _P, _P, _P)
        self.mask = self._of_variant("mask", _P, _I, _P, _I, _P)
        self.log_sum_exp = self._of_variant("log_sum_exp", _P, _I, _P, _I, _P, _P, _P)
        self.draw_tokens = self._of_variant("draw_tokens", _P, _I, _I, _P)
        return self.variant

    def _of_variant(self, name: str, *arguments: type) -> Any:
        return self._function(f"{self.variant}_{name}", _P, *arguments)

    def _function(self, name: str, *arguments: type, returns: type | None = None) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, returns
        return function

    def __str__(self) -> str:
        return f"native {self.variant}, {self.threads} threads"

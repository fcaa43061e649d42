"""The native CPU kernels, loaded: their C interface (src/api.h) through ctypes, and this process's team of threads.

ctypes releases the GIL during every call. All calls but `scatter_rows` come from a rank's engine thread, one at a time.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch

from common.base.errors import ConfigError
from common.base.variables import CPU_KERNELS

ABI_VERSION = 18

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


class LinearStruct(Structure):
    """struct kv_linear."""

    _fields_ = [
        *((name, c_int32) for name in ("format", "out", "inputs", "group", "is_paired")),
        *((name, c_void_p) for name in ("weight", "scale", "zero", "bias")),
    ]


class GateStruct(Structure):
    """struct kv_gate."""

    _fields_ = [("kind", c_int32), ("alpha", c_float), ("limit", c_float)]


class ExpertsStruct(Structure):
    """struct kv_experts."""

    _fields_ = [
        *((name, c_void_p) for name in ("gate_up", "down", "slots", "replicas", "counts")),
        *((name, c_int32) for name in ("first", "num_experts", "hidden", "inner", "slot_stride")),
        ("gate", GateStruct),
    ]


class ChoiceStruct(Structure):
    """struct kv_choice."""

    _fields_ = [("experts", c_void_p), ("weights", c_void_p), ("rows", c_int32), ("top_k", c_int32)]


class RouterStruct(Structure):
    """struct kv_router."""

    _fields_ = [
        ("logits", LinearStruct),
        ("selection_bias", c_void_p),
        *((name, c_int32) for name in ("scores", "num_experts", "top_k", "normalizes")),
        *((name, c_int32) for name in ("num_groups", "groups_kept", "group_score_of")),
        ("scaling", c_float),
    ]


class MixtureStruct(Structure):
    """struct kv_mixture."""

    _fields_ = [
        ("router", RouterStruct),
        ("experts", ExpertsStruct),
        ("shared_gate_up", LinearStruct),
        ("shared_down", LinearStruct),
    ]


class CacheStruct(Structure):
    """struct kv_cache."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int32) for name in ("dtype", "kv_heads", "head_dim", "block_size")),
        *((name, c_float) for name in ("k_scale", "v_scale")),
        ("window", c_int32),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
    ]


class BatchStruct(Structure):
    """struct kv_batch."""

    _fields_ = [
        *((name, c_int32) for name in ("num_entries", "num_rows")),
        *((name, c_void_p) for name in ("first_rows", "context_lens", "first_blocks", "block_ids", "slots")),
        *((name, c_void_p) for name in ("row_starts", "row_ends")),
        ("partial_dim", c_int32),
    ]


class LayerStruct(Structure):
    """struct kv_layer."""

    _fields_ = [
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("mixture", "input_norm", "mlp_norm", "head_norm")),
        *((name, c_float) for name in ("input_eps", "mlp_eps", "head_eps", "attention_scale")),
        *((name, c_int32) for name in ("hidden", "q_heads", "kv_heads", "head_dim", "dtype")),
    ]


class LoraRunStruct(Structure):
    """struct kv_lora_run."""

    _fields_ = [("start", c_int32), ("stop", c_int32)]


class LoraTermStruct(Structure):
    """struct kv_lora_term."""

    _fields_ = [
        *((name, c_void_p) for name in ("a", "b")),
        ("scale", c_float),
        *((name, c_int32) for name in ("rank", "inputs", "out", "first", "run")),
    ]


class LoraStruct(Structure):
    """struct kv_lora."""

    _fields_ = [("runs", c_void_p), ("terms", c_void_p * 4), ("counts", c_int32 * 4)]


class RotationStruct(Structure):
    """struct kv_rotation."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("positions", c_void_p)]


class ModelStruct(Structure):
    """struct kv_model."""

    _fields_ = [
        *((name, c_void_p) for name in ("layers", "caches", "batches", "embedding", "final_norm", "lm_head")),
        ("rotation", RotationStruct),
        ("num_layers", c_int32),
        ("final_eps", c_float),
    ]


class DrawStruct(Structure):
    """struct kv_draw."""

    _fields_ = [("logits", c_void_p), ("top", c_float), ("temperature", c_float), ("key", c_uint32 * 2)]


_P, _I, _L = c_void_p, c_int32, c_int64
_SIGNATURES = {
    "kv_scatter_rows": [_P, _L, _I, _P, _I, _L, _P, _L],
    "kv_linear_forward": [_P, _P, _P, _I, _L, _P, _I, _L, _I, _I],
    "kv_heads_forward": [_P, _P, _I, _P, _L, _L, _P, _L, _L, _I, _I],
    "kv_experts_forward": [_P, _P, _P, _P, _I, _P],
    "kv_mixture_forward": [_P, _P, _P, _I, _I, _P],
    "kv_rotation_angles": [_P, _P, _I, _P, _I, _P, _P],
    "kv_attention_forward": [_P, _P, _P, _I, c_float, _I, _P, _L, _P, _L, _P, _L, _P],
    "kv_layer_attend": [_P, _P, _P, _P, _P, _P, _P, _P],
    "kv_join_partials": [_P, _P, _I, _I, _I, _I, _P, _I, _P],
    "kv_layer_rows": [_P, _P, _I, _P, _P, _P, _P, _P],
    "kv_layer_project": [_P, _P, _I, _P, _P, _P],
    "kv_layer_mlp": [_P, _P, _I, _P, _P, _P],
    "kv_layers_forward": [_P, _I, _P, _P, _P, _P, _P, _P],
    "kv_model_forward": [_P, _P, _P, _P],
    "kv_lora_add": [_P, _P, _I, _P, _I, _P, _L, _P, _I, _L],
    "kv_silu_and_mul": [_P, _P, _I, _I, _I, _P],
    "kv_norm": [_P, _P, c_float, _I, _I, _I, _P, _P, _P],
    "kv_mask": [_P, _P, _I, _P, _I, _P],
    "kv_log_sum_exp": [_P, _P, _L, _I, _P, _I, _P, _P, _P],
    "kv_draw_tokens": [_P, _P, _I, _I, _P],
}


class NativeLibrary:
    """The kernels for this processor and the team of threads that runs them."""

    def __init__(self, path: Path, limit: str, threads: int) -> None:
        """`limit`: as `select` takes it. Raises: OSError, ConfigError."""
        library = ctypes.CDLL(str(path))
        self._select = library.kv_select_variant
        self._select.restype = c_char_p
        self._select.argtypes = [c_char_p]
        library.kv_team_new.restype = c_void_p
        library.kv_team_new.argtypes = [_I]
        if library.kv_abi_version() != ABI_VERSION:
            raise OSError(f"{path} has version {library.kv_abi_version()} of the interface, not {ABI_VERSION}")
        self.select(limit)
        self.threads = threads
        self.team: int | None = library.kv_team_new(threads)
        """struct kv_team, the first argument of every function below except `check_batch` and `scatter_rows`."""
        if self.team is None:
            raise ConfigError(f"cannot start {threads} threads for the native kernels")
        for name, argument_types in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = argument_types
        library.kv_check_batch.argtypes = [_P, _I, _I]
        self.check_batch = library.kv_check_batch
        self.scatter_rows = library.kv_scatter_rows
        self.linear_forward = library.kv_linear_forward
        self.heads_forward = library.kv_heads_forward
        self.experts_forward = library.kv_experts_forward
        self.mixture_forward = library.kv_mixture_forward
        self.rotation_angles = library.kv_rotation_angles
        self.attention_forward = library.kv_attention_forward
        self.layer_attend = library.kv_layer_attend
        self.join_partials = library.kv_join_partials
        self.layer_rows = library.kv_layer_rows
        self.layer_project = library.kv_layer_project
        self.layer_mlp = library.kv_layer_mlp
        self.layers_forward = library.kv_layers_forward
        self.model_forward = library.kv_model_forward
        self.lora_add = library.kv_lora_add
        self.silu_and_mul = library.kv_silu_and_mul
        self.norm = library.kv_norm
        self.mask = library.kv_mask
        self.log_sum_exp = library.kv_log_sum_exp
        self.draw_tokens = library.kv_draw_tokens

    def select(self, limit: str) -> str:
        """Use the best variant that this processor runs, at most `limit`: a value of `CPU_KERNELS`, "" for none. Returns its
        name. The choice is the whole process's. Raises: ConfigError.
        """
        chosen: bytes | None = self._select(limit.encode())
        if chosen is None:
            raise ConfigError(f"{CPU_KERNELS}={limit!r} names no kernels that this processor runs")
        self.variant = chosen.decode()
        return self.variant

    def __str__(self) -> str:
        return f"native {self.variant}, {self.threads} threads"

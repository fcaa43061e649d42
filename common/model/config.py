"""What a model directory says about the model: `config.json` and `generation_config.json`, checked once.

Used by every process, the router included; pure, no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from common.base.errors import ConfigError
from common.model.formats.quantization import Quantization, parse_quantization

DEMO_MODEL_PATH = Path(__file__).resolve().parent / "demo_model"
"""The model that comes with kvrelay (`--model demo`), in Hugging Face format; trained by `common.tools.demo`."""

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `inv_freq` derives from these alone. `kind` is "default", "linear" or "llama3"."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model; everything that building and running it needs."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope: RopeConfig
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on the q, k and v projections."""
    output_bias: bool
    """Bias on attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before rope."""
    max_position_embeddings: int
    sliding_window: int | None
    """Tokens that a row can see where the model uses a window. Ours attends to all: longer contexts are refused."""
    dtype: str
    """Of the weights in the files."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None
    """Of linear layers' weights; None: all are stored in `dtype`."""

    @property
    def max_context(self) -> int:
        """The longest context, in tokens, for which full causal attention is what the model was made for."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def fit_context(self, max_model_len: int | None) -> int:
        """`max_model_len` if the model can serve it; None asks for the longest possible.

        Raises: ConfigError if it is beyond the model's positions or its sliding window.
        """
        if max_model_len is None:
            return self.max_context
        if max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
        if max_model_len > self.max_context:
            why = "sliding attention window" if self.max_context == self.sliding_window else "max_position_embeddings"
            raise ConfigError(
                f"max_model_len {max_model_len} is above the model's {why} of {self.max_context}; ask for at most that"
            )
        return max_model_len

    def resolve_dtype(self, requested: str) -> str:
        """`requested`, or the files' own dtype for "auto".

        Raises: ConfigError for an unknown dtype.
        """
        dtype = self.dtype if requested == "auto" else requested
        if dtype not in SUPPORTED_DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}; known: auto, {', '.join(SUPPORTED_DTYPES)}")
        return dtype


@dataclass(frozen=True)
class _Family:
    """What an architecture's code fixes or defaults, where config.json is silent."""

    default_kv_heads: int | None
    default_max_position: int
    default_head_dim: int | None = None
    qkv_bias: bool | None = None
    """None: `attention_bias` in the file decides, for the output projection too."""
    has_mlp_bias: bool = False
    qk_norm: bool = False
    window: Literal["none", "always", "switch"] = "none"
    """Whether `sliding_window` counts; "switch": where `use_sliding_window` is true."""


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(None, 2048, has_mlp_bias=True),
    "MistralForCausalLM": _Family(8, 131072, qkv_bias=False, window="always"),
    "Qwen2ForCausalLM": _Family(32, 32768, qkv_bias=True, window="switch"),
    "Qwen3ForCausalLM": _Family(32, 32768, 128, qk_norm=True, window="switch"),
}


def load_model_config(path: Path) -> ModelConfig:
    """The config of the model in directory `path`.

    Raises: ConfigError, one sentence, for a missing or corrupt file, an unsupported architecture or feature.
    """
    return _Reader(path).read()


def resolve_model(name_or_path: str) -> Path:
    """The model's directory: `name_or_path` itself if it exists, else a hub snapshot of its small and safetensors files.

    "demo" is the small model that comes along.

    Raises: ConfigError if neither can be had.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if name_or_path == "demo":
        return DEMO_MODEL_PATH
    if path.exists():
        raise ConfigError(f"model path {name_or_path} is not a directory")
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
        raise ConfigError(f"model directory {name_or_path} does not exist")
    # Imported here because it costs half a second, which a start from a local directory need not pay.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=patterns))
    except HFValidationError as error:
        raise ConfigError(f"{name_or_path} is neither a directory nor a valid hub model name") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"model {name_or_path} is no directory and the hub did not deliver it: {reason}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in file `path`.

    Raises: ConfigError if it is missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", value)


class _Reader:
    """Typed access to one directory's config files, with errors that name file and key."""

    def __init__(self, path: Path) -> None:
        self._file = path / "config.json"
        self._raw = read_json_object(self._file)
        generation = path / "generation_config.json"
        self._generation = read_json_object(generation) if generation.exists() else {}

    def read(self) -> ModelConfig:
        architecture, family = self._family()
        heads = self._int("num_attention_heads")
        hidden = self._int("hidden_size")
        kv_heads = self._int("num_key_value_heads", family.default_kv_heads or heads)
        bias = family.qkv_bias if family.qkv_bias is not None else self._bool("attention_bias", False)
        config = ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            num_layers=self._int("num_hidden_layers"),
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self._int("head_dim", family.default_head_dim or hidden // heads),
            intermediate_size=self._int("intermediate_size"),
            vocab_size=self._int("vocab_size"),
            rope=self._rope(),
            rms_norm_eps=self._float(self._raw, "rms_norm_eps", 1e-6),
            tie_word_embeddings=self._bool("tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias and family.qkv_bias is None,
            mlp_bias=family.has_mlp_bias and self._bool("mlp_bias", False),
            qk_norm=family.qk_norm,
            max_position_embeddings=self._int("max_position_embeddings", family.default_max_position),
            sliding_window=self._window(family),
            dtype=self._dtype(),
            eos_token_ids=self._token_ids("eos_token_id"),
            bos_token_id=next(iter(self._token_ids("bos_token_id")), None),
            quantization=self._quantization(),
        )
        if heads % kv_heads:
            raise self._error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if config.head_dim % 2:
            raise self._error(f"head_dim {config.head_dim} is odd, which rotary embeddings cannot be")
        return config

    def _family(self) -> tuple[str, _Family]:
        named = self._raw.get("architectures")
        names = cast("list[Any]", named) if isinstance(named, list) else []
        for name in names:
            if name in _FAMILIES:
                self._refuse_variants()
                return name, _FAMILIES[name]
        known = ", ".join(_FAMILIES)
        raise self._error(f"architecture {names or 'is not given, so it'} is not supported; supported: {known}")

    def _refuse_variants(self) -> None:
        act = self._raw.get("hidden_act", "silu")
        if act != "silu":
            raise self._error(f"hidden_act {act!r} is not supported; supported: silu")

    def _quantization(self) -> Quantization | None:
        # Older files of compressed-tensors use the second name.
        raw = self._raw.get("quantization_config", self._raw.get("compression_config"))
        try:
            return parse_quantization(raw)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _rope(self) -> RopeConfig:
        raw = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        if not isinstance(raw, dict):
            raise self._error("its rope parameters are not an object")
        scaling = cast("dict[str, Any]", raw)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = self._float(scaling, "rope_theta", self._float(self._raw, "rope_theta", 10000.0))
        if kind == "default":
            return RopeConfig(theta)
        factor = self._float(scaling, "factor")
        if kind == "linear":
            return RopeConfig(theta, kind, factor)
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                factor,
                self._float(scaling, "low_freq_factor"),
                self._float(scaling, "high_freq_factor"),
                int(self._float(scaling, "original_max_position_embeddings")),
            )
        raise self._error(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")

    def _window(self, family: _Family) -> int | None:
        if family.window == "none" or (family.window == "switch" and not self._bool("use_sliding_window", False)):
            return None
        if self._raw.get("sliding_window", 0) is None:
            return None
        return self._int("sliding_window", 4096)

    def _dtype(self) -> str:
        dtype = self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32"
        return str(dtype).removeprefix("torch.")

    def _token_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key`; what generation_config.json says goes before config.json."""
        for source in (self._generation, self._raw):
            value = source.get(key)
            if value is None:
                continue
            ids = cast("list[Any]", value) if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and i >= 0 for i in ids):
                raise self._error(f"{key} {value!r} is not a token id or a list of them")
            return tuple(ids)
        return ()

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self._error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{key} must be a positive integer, not {value!r}")
        return value

    def _bool(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(f"{key} must be true or false, not {value!r}")
        return value

    def _float(self, raw: dict[str, Any], key: str, default: float | None = None) -> float:
        value = raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self._error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._error(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._file}: {message}")

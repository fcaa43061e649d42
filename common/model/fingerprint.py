"""Identity of a model: of its weights and its tokenizer, found in well under a second. No torch.

Nodes compute both at start-up; a router compares its own tokenizer with that of the nodes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.config.option_groups import Quantization
from common.model.config import ModelConfig
from common.model.description import MultiHeadDescription
from common.model.files import Header, is_torch_file, read_header, read_torch_header, weight_files
from common.model.hub import is_gguf
from common.model.pooling.decoder_config import PoolingDecoderConfig
from common.model.pooling.encoder_config import EncoderConfig
from common.model.tokenizer_folder import tokenizer_folder

_SAMPLE_BYTES = 64
_NOT_IDENTITY = (
    *("max_position_embeddings", "dtype", "eos_token_ids", "bos_token_id", "weight_names"),
    *("max_model_len", "weight_prefix", "model", "mtp_layer", "draft_head"),
)
"""Config fields that change neither weights nor KV, and what is fingerprinted separately: a draft head, and the model of a
decoder that pools."""
ARITHMETICS = ("amx", "bf16")
"""The names that `common.kernels.native.find.arithmetic` appends."""


def fingerprint(
    path: Path,
    config: ModelConfig,
    load_format: str,
    dtype: str,
    seed: int,
    drawn_on: str = "cpu",
    quantization: Quantization = "auto",
    arithmetic: str = "",
    tokenizer: str | None = None,
) -> str:
    """Identity of what a node computes with: two nodes whose fingerprints agree produce interchangeable KV.

    Covers the config, the tokenizer (`tokenizer_digest`; `tokenizer` is that of another one than the model's own), and of every weight file its header, its size and a
    sample of each tensor's bytes (start, middle, end), so that fine-tunes of one model differ; for dummy weights,
    config, seed and `drawn_on`, the kind of device that drew them. Independent of the directory's path and of file times.
    What `--quantization` makes of the weights, the draft head, and `arithmetic` (`common.kernels.native.find`), are appended by name, so that
    a refusal says it.

    Raises: ConfigError for missing or corrupt files.
    """
    identity = {"config": _identity(config), "dtype": dtype, "dummy_seed": seed if load_format == "dummy" else None}
    if load_format == "dummy" and drawn_on != "cpu":
        identity["drawn_on"] = drawn_on
    digest = hashlib.sha256(b"kvrelay-weights-2")
    digest.update(json.dumps(identity, sort_keys=True).encode())
    digest.update(_tokenizer_of(path, tokenizer).encode())
    if load_format != "dummy":
        for file in weight_files(path):
            digest.update(_file_digest(file))
    head = "" if config.draft_head is None else config.draft_head.name
    names = (quantization if quantization in ("int8", "int4") else "", head, arithmetic)
    return "-".join((digest.hexdigest()[:32], *filter(None, names)))


def without_arithmetic(fingerprint: str) -> str:
    """The fingerprint without the name of its arithmetic, which decides only last bits."""
    head, _, name = fingerprint.rpartition("-")
    return head if name in ARITHMETICS else fingerprint


def pooling_fingerprint(
    path: Path,
    config: EncoderConfig | PoolingDecoderConfig,
    load_format: str,
    dtype: str,
    seed: int,
    quantization: Quantization,
    tokenizer: str | None = None,
) -> str:
    """The same of a pooling model: vectors of nodes whose fingerprints differ must not be compared. `dtype`: of decoders;
    encoders compute in float32.

    Raises: ConfigError for missing or corrupt files.
    """
    is_decoder = isinstance(config, PoolingDecoderConfig)
    identity = {
        "config": _identity(config),
        "model": _identity(config.model) if is_decoder else None,
        "dtype": config.model.resolve_dtype(dtype) if is_decoder else "float32",
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(_tokenizer_of(path, tokenizer).encode())
    if load_format == "dummy":
        digest.update(str(seed).encode())
    else:
        for file in weight_files(path):
            digest.update(_file_digest(file))
    suffix = f"-{quantization}" if quantization in ("int8", "int4") else ""
    return f"pooling-{digest.hexdigest()[:32]}{suffix}"


def _identity(config: ModelConfig | EncoderConfig | PoolingDecoderConfig) -> dict[str, Any]:
    identity = {name: value for name, value in asdict(config).items() if name not in _NOT_IDENTITY}
    if isinstance(config, ModelConfig):
        kinds = [layer.attention.kind for layer in config.layers]
        if set(kinds) != {MultiHeadDescription.kind}:  # otherwise left out, as before there were other kinds
            identity["attention kinds"] = kinds
    return identity


def _tokenizer_of(path: Path, tokenizer: str | None) -> str:
    return tokenizer_digest(tokenizer_folder(path)) if tokenizer is None else tokenizer


def tokenizer_digest(folder: Path) -> str:
    """Digest of the tokenizer.json in `folder`, 32 hex digits; empty where there is none (`--load-format dummy`).

    Raises: ConfigError for a file that cannot be read.
    """
    file = folder / "tokenizer.json"
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:32]
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def files_digest(path: Path, config: dict[str, Any]) -> str:
    """Digest of a config and of the weight files in a folder, 8 hex digits. Raises: ConfigError."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in weight_files(path):
        digest.update(_file_digest(file))
    return digest.hexdigest()[:8]


def _header_of(file: Path) -> Header:
    if is_torch_file(file):
        return read_torch_header(file)
    if not is_gguf(file):
        return read_header(file)
    # Imported here because it costs a fifth of a second, which other models need not pay.
    from common.model.gguf.file import open_gguf

    return open_gguf(file).header


def _file_digest(file: Path) -> bytes:
    header = _header_of(file)
    digest = hashlib.sha256(header.raw)
    digest.update(header.size_bytes.to_bytes(8, "little"))
    try:
        with file.open("rb") as stream:
            for _, (lo, hi) in sorted(header.spans.items()):
                for at in (lo, (lo + hi) // 2, max(lo, hi - _SAMPLE_BYTES)):
                    stream.seek(at)
                    digest.update(stream.read(min(_SAMPLE_BYTES, hi - at)))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    return digest.digest()

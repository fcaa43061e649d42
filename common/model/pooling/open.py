"""Opens a pooling model of any kind: its config, without torch, and then the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from common.base.errors import ConfigError
from common.config.option_groups import ModelOptions
from common.model.hub import is_gguf
from common.model.pooling.decoder_config import PoolingDecoderConfig, read_pooling_decoder
from common.model.pooling.encoder_config import EncoderConfig, is_encoder, read_encoder_config
from common.model.pooling.sentence_transformers import default_prompt

if TYPE_CHECKING:
    from common.model.pooling.pooler import PoolingModel

log = logging.getLogger(__name__)


def read_pooling_config(path: Path, max_model_len: int | None) -> EncoderConfig | PoolingDecoderConfig:
    """The pooling model at `path`, for inputs of at most `max_model_len` tokens. Raises: ConfigError."""
    if is_gguf(path):
        raise ConfigError(f"{path}: GGUF files do not pool; give the folder of a checkpoint in safetensors")
    config = read_encoder_config(path) if is_encoder(path) else read_pooling_decoder(path)
    if prompt := default_prompt(path):
        log.warning(
            "sentence-transformers puts %r before every text of %s (default_prompt_name); here texts are taken as they are, "
            "so clients must send it",
            prompt,
            path,
        )
    return config if max_model_len is None else config.with_context(max_model_len)


def load_pooling_model(path: Path, config: EncoderConfig | PoolingDecoderConfig, options: ModelOptions) -> PoolingModel:
    """The model with its weights; imports torch. Raises: ConfigError for missing or wrong weights."""
    if isinstance(config, EncoderConfig):
        from common.model.pooling.bert import Encoder

        return Encoder(path, config)
    from common.model.loader import load_model
    from common.model.pooling.decoder import PoolingDecoder

    model = load_model(
        path,
        config.model,
        dtype=options.dtype,
        load_format=options.load_format,
        seed=options.seed,
        small_batches=False,
        quantization=options.quantization,
        lm_head=False,
    )
    return PoolingDecoder(model, config)

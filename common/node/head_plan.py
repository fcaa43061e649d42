"""Plans the draft head of a node (`--speculate mtp` and `eagle:PATH`) before any weight is read. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.base.errors import ConfigError
from common.config.service_configs import NodeConfig
from common.config.speculation import HEAD_METHODS, Speculation
from common.model.config import ModelConfig
from common.model.draft_head_description import DraftHeadDescription
from common.model.eagle_config import read_eagle_head
from common.model.generic.config import GenericConfig
from common.model.hub import resolve_model

_MTP_MODELS = "DeepSeek V3 and R1, GLM-4.5 and 4.6 have one: num_nextn_predict_layers 1 in config.json"


def with_draft_head(
    model: ModelConfig, path: Path, speculation: Speculation | None, config: NodeConfig, num_stages: int
) -> ModelConfig:
    """`model` with the head that `speculation` names, if it names one.

    Raises: ConfigError in one sentence if the model has no such head, or if the node's ranks cannot run it.
    """
    if speculation is None or speculation.method not in HEAD_METHODS:
        return model
    option = "--speculate mtp" if speculation.method == "mtp" else "--speculate eagle:PATH"
    if isinstance(model, GenericConfig):
        raise ConfigError(f"{option} needs a model that kvrelay implements itself, not --model-impl transformers")
    if num_stages > 1:
        raise ConfigError(f"{option} does not work with pipeline stages: use tensor parallelism, or --speculate suffix")
    if config.context_parallel > 1:
        raise ConfigError(f"{option} does not work with context parallelism: use --speculate suffix")
    if config.data_parallel_attention:
        raise ConfigError(f"{option} does not work with --data-parallel-attention: use --speculate suffix")
    if speculation.method == "eagle3":
        try:
            return replace(model, draft_head=read_eagle_head(resolve_model(speculation.model), model))
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
    if model.mtp_layer is None:
        raise ConfigError(f"{option}: {path} has no layer for multi-token prediction ({_MTP_MODELS})")
    return replace(model, draft_head=DraftHeadDescription(model.mtp_layer))

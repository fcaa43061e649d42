"""Reads the config of an EAGLE-3 head: `LlamaForCausalLMEagle3`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.model.config import ModelConfig
from common.model.config_file import ConfigFile, architectures, as_list
from common.model.description import LayerDescription
from common.model.draft_head_description import DraftHeadDescription
from common.model.families.base import read_attention, read_mlp, read_norm
from common.model.fingerprint import files_digest
from common.model.rope import read_rope

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_NUM_AUX = 3
_LEAST_LAYERS = 6
"""Fewest layers of a model whose default auxiliary layers are three different ones."""


def read_eagle_head(path: Path, model: ModelConfig) -> DraftHeadDescription:
    """The head in the folder `path`, for `model`.

    Raises: ConfigError if it is no such head, or belongs to a model of another hidden size or vocabulary.
    """
    config = ConfigFile(path / "config.json")
    names = architectures(config.raw)
    if not any(name in _ARCHITECTURES for name in names):
        raise config.error(f"architecture {names} is no EAGLE-3 head ({_ARCHITECTURES[0]})")
    for what, ours in (("hidden_size", model.hidden_size), ("vocab_size", model.vocab_size)):
        theirs = config.integer(what)
        if theirs != ours:
            raise config.error(f"the head has a {what} of {theirs}, and the model has {ours}")
    if config.integer("target_hidden_size", model.hidden_size) != model.hidden_size:
        raise config.error("target_hidden_size is not the model's hidden_size")
    if config.integer("num_hidden_layers", 1) != 1:
        raise config.error("EAGLE-3 heads of several layers are not supported")
    eagle = config.object("eagle_config")
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise config.error("EAGLE-3 heads without auxiliary hidden states are not supported")
    attention = read_attention(config, bias=config.flag("attention_bias", False))
    mlp = read_mlp(config, bias=config.flag("mlp_bias", False))
    return DraftHeadDescription(
        LayerDescription(attention, mlp, read_norm(config), read_rope(config)),
        path=path,
        identity=files_digest(path, config.raw),
        aux_layers=_aux_layers(config, eagle, model.num_layers),
        vocab_size=min(config.integer("draft_vocab_size", model.vocab_size), model.vocab_size),
        is_residual_normed=config.flag("norm_before_residual", False),
    )


def _aux_layers(config: ConfigFile, eagle: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs the head reads, ascending: by default an early, a middle and a late one."""
    named = eagle.get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        if num_layers < _LEAST_LAYERS:
            raise config.error(f"eagle_aux_hidden_state_layer_ids is missing, and the model has {num_layers} layers")
        return 2, num_layers // 2, num_layers - 3
    ids = as_list(named)
    valid = sorted({each for each in ids if type(each) is int and 0 <= each < num_layers})
    if len(valid) != _NUM_AUX or len(ids) != _NUM_AUX:
        raise config.error(f"eagle_aux_hidden_state_layer_ids {named!r} are not {_NUM_AUX} of {num_layers} layers")
    return tuple(valid)

"""The models that `kvrelay up` serves, and what each is for. Reads their configs before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.base.errors import ConfigError
from common.config.fields import listed
from common.config.service_configs import UpConfig
from common.config.sources import Source
from common.control.messages import Task
from common.model.hub import CONFIG_FILES, model_name, resolve_model
from common.model.pooling.task import find_task

_OF_ONE_MODEL = ("task",)
_OF_ONE_GENERATING = ("served_model_name", "lora", "tokenizer", "chat_template", "tool_call_parser", "reasoning_parser")
_OF_GENERATING = (
    *("decode", "decode_tp", "decode_pp", "decode_pp_layers", "decode_context_parallel", "lora"),
    *("prefill_data_parallel_attention", "decode_data_parallel_attention"),
)


class UpModel(NamedTuple):
    """One model: as `--model` names it, what it is served for, and its directory or GGUF file."""

    model: str
    task: Task
    path: Path

    @property
    def generates(self) -> bool:
        return self.task == "generate"


def find_models(config: UpConfig, sources: Mapping[str, Source]) -> list[UpModel]:
    """The models of `--model`. What is on the hub is downloaded: first the configs, and once all options fit, the weights,
    which the time limit of the start does not count.

    Raises: ConfigError for a model that is not there, two of one name, or an option that fits none or several of them.
    """
    is_one = Path(config.model).expanduser().is_dir()  # even if its name has a comma
    named = [config.model] if is_one else listed("model", config.model)
    if not named:
        raise ConfigError("--model names no model")
    folders = {model: resolve_model(model, patterns=CONFIG_FILES) for model in named}
    twice = [name for name, count in Counter(map(model_name, folders.values())).items() if count > 1]
    if twice or len(folders) < len(named):
        raise ConfigError(
            f"--model names two models {twice[0] if twice else named[0]!r}: give their folders other names"
        )
    found = [UpModel(model, find_task(path, config.task), path) for model, path in folders.items()]
    given = [name for name, source in sources.items() if source not in ("default", "file")]
    generating = [each.model for each in found if each.generates]
    if len(found) > 1:
        _refuse(given, _OF_ONE_MODEL, "belongs to one model, and several are served")
    if config.planner == "apply" and not len(generating) == len(found) == 1:
        raise ConfigError("--planner apply is for clusters of one model, which generates")
    if len(generating) > 1:
        _refuse(given, _OF_ONE_GENERATING, "belongs to one model that generates, and several are served")
    if not generating:
        _refuse(given, _OF_GENERATING, f"has no effect: {config.model} does not generate")
    if len(generating) < len(found) and not config.prefill:
        pooling = next(each.model for each in found if not each.generates)
        raise ConfigError(f"--prefill 0: {pooling} needs prefill nodes, since it does not generate")
    for model in named:
        resolve_model(model)
    return found


def _refuse(given: list[str], options: tuple[str, ...], why: str) -> None:
    """Raises: ConfigError if one of `options` is among the `given` ones."""
    for name in given:
        if name in options:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")

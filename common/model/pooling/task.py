"""What a model is served for: generating, embedding or scoring. No torch."""

from __future__ import annotations

from pathlib import Path

from common.base.errors import ConfigError
from common.config.option_groups import TaskName
from common.control.messages import Task
from common.model.config_file import first_architecture
from common.model.families.registry import with_head
from common.model.hub import is_gguf
from common.model.pooling.encoder_config import ARCHITECTURES
from common.model.pooling.sentence_transformers import is_sentence_transformer


def find_task(path: Path, wanted: TaskName = "auto") -> Task:
    """The task of the model in directory or GGUF file `path`, for `--task`.

    By default encoders embed or score, as their class says; decoders embed if sentence-transformers has saved them or their
    class has no LM head, else they generate. Raises: ConfigError if the model cannot do what is wanted.
    """
    name = "" if is_gguf(path) else first_architecture(path)
    of_encoder = ARCHITECTURES.get(name)
    if of_encoder is not None:
        if wanted not in ("auto", of_encoder):
            raise ConfigError(f"--task {wanted}: {name} in {path} can only {of_encoder}")
        return of_encoder
    if wanted == "score":
        scoring = ", ".join(known for known, task in ARCHITECTURES.items() if task == "score")
        raise ConfigError(f"--task score needs a cross-encoder ({scoring}), not {name or path}")
    if wanted != "auto":
        return wanted
    return "embed" if is_sentence_transformer(path) or with_head(name) is not None else "generate"

"""Where a model's files are: a directory, a GGUF file, the Hugging Face hub, or the model that comes with kvrelay.

No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.base.errors import ConfigError

DEMO_MODEL_PATH = Path(__file__).resolve().parent / "demo_model"
"""The model that comes with kvrelay (`--model demo`), in Hugging Face format; trained by `scripts.demo_model`."""
CONFIG_FILES = ("config.json", "modules.json")
"""What says which kind of model it is."""
_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
"""The tokenizer, and the other small files."""
_REPOSITORY = "models--"
"""Prefix of a repository's folder in the hub's cache."""


def is_gguf(path: Path) -> bool:
    """Whether the model is a GGUF file."""
    return path.suffix == ".gguf"


def model_folder(path: Path) -> Path:
    """The directory that holds the model's generation config, and its tokenizer unless a GGUF file has it."""
    return path.parent if is_gguf(path) else path


def model_name(path: Path) -> str:
    """The model's name in the API, unless another one is given. path: from `resolve_model`."""
    if path == DEMO_MODEL_PATH:
        return "demo"
    repository = path.parent.parent.name  # of a snapshot: models--ORG--NAME/snapshots/COMMIT
    if path.parent.name == "snapshots" and repository.startswith(_REPOSITORY):
        return repository.removeprefix(_REPOSITORY).replace("--", "/")
    return path.stem if is_gguf(path) else path.name


def resolve_tokenizer(name_or_path: str) -> Path:
    """The directory with a tokenizer's files, as an absolute path: `name_or_path` itself, the directory of that file, or a hub
    snapshot without weights.

    Raises: ConfigError if there is none.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file() and not is_gguf(path):
        return path.absolute().parent
    return resolve_model(name_or_path, patterns=_TOKENIZER_FILES)


def resolve_model(name_or_path: str, *, patterns: Sequence[str] = ()) -> Path:
    """The model's directory or GGUF file, as an absolute path: `name_or_path` itself if it exists, else a hub snapshot of its
    small and weight files, or only of the files that `patterns` name.

    "demo" is the small model that comes with kvrelay. ORG/NAME@REVISION is a commit, tag or branch on the hub.

    Raises: ConfigError if there is neither a directory nor a snapshot.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path.absolute()  # nodes register it, and routers may have another working directory
    if name_or_path == "demo":
        return DEMO_MODEL_PATH
    if path.exists():
        raise ConfigError(f"model path {name_or_path} is neither a directory nor a GGUF file")
    name, at, revision = name_or_path.partition("@")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ConfigError(f"model directory {name_or_path} does not exist")
    if at and not revision:
        raise ConfigError(f"{name_or_path} names no revision after the @")
    # Imported here because it costs half a second, which a start from a local directory need not pay.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*patterns] or [*_TOKENIZER_FILES, "*.safetensors"]
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
        if not patterns and not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision or None, allow_patterns=["pytorch_model*.bin"])
        return folder
    except HFValidationError as error:
        raise ConfigError(f"{name_or_path} is neither a directory nor a valid hub model name") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"model {name_or_path} is not a directory, and downloading it from the hub failed: {reason}"
        ) from error

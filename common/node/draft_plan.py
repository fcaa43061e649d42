"""Plans the draft model of a decode node (`--speculate draft:MODEL`) before any weight is read. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.base.errors import ConfigError
from common.config.service_configs import NodeConfig
from common.control.messages import ModelInfo
from common.kernels.native.find import arithmetic
from common.kv.rank_layout import KVLayout
from common.model.choose import choose_model
from common.model.files import files_state
from common.model.fingerprint import fingerprint, tokenizer_digest
from common.model.hub import model_name, resolve_model
from common.model.kv_spec import in_one_table, kv_spec
from common.model.tokenizer_folder import tokenizer_folder
from common.node.kv_budget import KvMemoryRequest
from common.node.options import ExpertSettings
from common.node.plan import NodePlan

_LEAST_BLOCKS = 2


def plan_draft(config: NodeConfig, target: NodePlan, name: str) -> NodePlan:
    """The plan of the draft model `name` on the leader of `target`'s node: whole, in the target's dtype, with one block table.

    Raises: ConfigError in one sentence if there is no such model, or if its vocabulary is not the target's.
    """
    try:
        path = resolve_model(name)
        model_config = choose_model(path, config.model_impl)
    except ConfigError as error:
        raise ConfigError(f"the draft model: {error}") from error
    folder = tokenizer_folder(path)
    check_vocabulary(model_config.vocab_size, folder, target)
    max_model_len = min(model_config.max_context, target.model.max_model_len)
    model_config = model_config.for_context(max_model_len)
    dtype = model_config.resolve_dtype(target.dtype)
    quantization = target.quantization
    if quantization == "fp8" or model_config.quantization is not None:
        quantization = "auto"  # the checkpoint says what its weights are
    tokenizer = tokenizer_digest(folder)
    bf16 = arithmetic() if target.device == "cpu" and dtype == "bfloat16" else ""
    load_format = config.load_format
    identity = fingerprint(path, model_config, load_format, dtype, config.seed, "cpu", quantization, bf16, tokenizer)
    return replace(
        target,
        path=path,
        tokenizer=folder,
        model_config=model_config,
        layout=KVLayout(identity, in_one_table(kv_spec(model_config, dtype)), 1, (model_config.num_layers,)),
        model=ModelInfo(model_name(path), str(path), model_config.vocab_size, max_model_len, tokenizer),
        dtype=dtype,
        quantization=quantization,
        weights_state=files_state(path, load_format),
        kv_memory=KvMemoryRequest(target.kv_memory.utilization, blocks=_LEAST_BLOCKS),  # until the target's are known
        steps=replace(target.steps, max_model_len=max_model_len, num_microbatches=1, depth=1),
        lora_folders={},
        experts=ExpertSettings(None, 0),
        speculation=None,
    )


def check_vocabulary(vocab_size: int, folder: Path, target: NodePlan) -> None:
    """Refuse a draft model whose token ids mean something else. `folder`: of its tokenizer; without a tokenizer.json there only
    the sizes are compared.

    Raises: ConfigError.
    """
    ours = target.model.vocab_size
    if vocab_size != ours:
        raise ConfigError(f"the draft model has a vocabulary of {vocab_size} tokens, and the model has {ours}")
    if tokenizer_digest(folder) in ("", target.model.tokenizer):
        return
    theirs, own = _tokens(folder), _tokens(target.tokenizer)
    different = next((token for token, number in own.items() if theirs.get(token) != number), None)
    if different is not None:
        raise ConfigError(
            f"the draft model has another vocabulary: token {different!r} is {own[different]} in the model and "
            f"{theirs.get(different)} in the draft model"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """The id of each token in tokenizer.json. Raises: ConfigError."""
    file = folder / "tokenizer.json"
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
        vocab: Any = content["model"]["vocab"]
        added = {str(each["content"]): int(each["id"]) for each in content.get("added_tokens", ())}
        pairs = vocab.items() if isinstance(vocab, dict) else ((each[0], at) for at, each in enumerate(vocab))
        return {**{str(token): int(number) for token, number in pairs}, **added}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"cannot compare vocabularies: {file} is missing or malformed ({error})") from error

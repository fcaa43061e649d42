"""What a class of transformers asks of attention, found by running it once without weights.

The model is built on PyTorch's meta device and computes eight positions, with an attention function that notes what each
layer passes, and a mask function whose masks can be recognised and whose rule is compared with causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.base.errors import ConfigError
from common.model.generic.library import load
from common.model.generic.rope import ignore_lengths

_NAME = "kvrelay_probe"
_POSITIONS = 8
_META = torch.device("meta")
_KNOWN_OPTIONS = {
    *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache"),
    *("cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
"""Arguments of the attention function that are honoured, or that change nothing in it."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function."""

    module: str
    """Name of the attention module."""
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    """Tokens that a row sees, from the mask; None: all before it."""
    soft_cap: float | None
    sinks: str | None
    """The module's own parameter whose numbers join the softmax, one for each head; None: there is none."""


class _Rule(NamedTuple):
    """The rule of a mask, attached to the tensor that stands for it."""

    window: int | None
    is_known: bool


_RULE = "kvrelay_rule"


def build_on_meta(cls: Any, config: Any, attention: str, dtype: torch.dtype) -> Any:
    """The model without weights. Raises: ConfigError if the class cannot be built."""
    try:
        with _META:
            model = cls._from_config(config, attn_implementation=attention, dtype=dtype).eval()
    except Exception as error:  # a class may raise anything
        raise cannot_be_built(cls, error) from error
    _keep_wide(model, dtype)
    return model


def _keep_wide(model: Any, dtype: torch.dtype) -> None:
    """Make what the class keeps in float32 beside weights of `dtype` float32, as transformers does where it loads weights: biases
    that choose experts would be rounded to others."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    if not plan:
        return
    patterns, names, _ = load("transformers.core_model_loading").build_glob_alternation(list(plan))
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                found = patterns.search(f"{prefix}.{key}")
                if tensor is not None and found is not None and key not in module._non_persistent_buffers_set:
                    tensor.data = tensor.data.to(plan[names[found.lastgroup]])


def probe(cls: Any, config: Any) -> tuple[Any, list[AttentionCall]]:
    """The model on the meta device, and its attention calls in order.

    Raises: ConfigError naming what attention would have to do and does not.
    """
    calls = _Calls()
    load("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register(_NAME, calls.note)
    load("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
    model = build_on_meta(cls, config, _NAME, torch.float32)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the only one whose operations do not depend on data
    ignore_lengths(model)
    calls.names = {module: name for name, module in model.named_modules()}
    zeros = torch.zeros(1, _POSITIONS, dtype=torch.int64, device=_META)
    try:
        with torch.inference_mode():
            # A mask of ones, without which transformers would look into the positions, which have no values.
            model(input_ids=zeros, position_ids=zeros, attention_mask=torch.ones_like(zeros), use_cache=False)
    except ConfigError:
        raise
    except Exception as error:  # a class may fail without weights or without a cache
        raise ConfigError(f"{cls.__name__} does more than attention over a KV cache: {_first_line(error)}") from error
    return model, calls.found


class _Calls:
    """The calls of attention in one run of a model."""

    def __init__(self) -> None:
        self.names: dict[nn.Module, str] = {}
        """Name of each of the model's modules."""
        self.found: list[AttentionCall] = []

    def note(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        given = {name for name, option in options.items() if option is not None and option is not False}
        if unknown := sorted(given - _KNOWN_OPTIONS):
            raise ConfigError(f"{type(module).__name__} gives attention {', '.join(unknown)}, which is not implemented")
        if options.get("dropout"):
            raise ConfigError(f"{type(module).__name__} asks for dropout")
        if options.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise ConfigError(f"{type(module).__name__} is not causal")
        rule = getattr(attention_mask, _RULE, None)
        if rule is not None and not rule.is_known:
            raise ConfigError(f"the mask of {type(module).__name__} is neither causal attention nor a sliding window")
        if rule is None:
            raise ConfigError(f"{type(module).__name__} makes its own attention mask, which is not implemented")
        if query.size(2) != key.size(2) or query.size(0) != 1:
            raise ConfigError(f"{type(module).__name__} attends to other tokens than those of the sequence")
        scale = options.get("scaling")
        self.found.append(
            AttentionCall(
                self.names[module],
                query.size(1),
                key.size(1),
                key.size(3),
                value.size(3),
                query.size(3) ** -0.5 if scale is None else float(scale),
                rule.window,
                options.get("softcap"),
                _sinks(module, options.get("s_aux")),
            )
        )
        return query.new_empty(1, query.size(2), query.size(1), value.size(3)), None


def _sinks(module: nn.Module, given: Tensor | None) -> str | None:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter is given:
            return name
    if given is not None:
        raise ConfigError(
            f"the attention sinks of {type(module).__name__} are no parameter of it, which is not implemented"
        )
    return None


def _mask(mask_function: Callable[..., Any], local_size: int | None = None, **options: Any) -> Tensor:
    """Stands for a mask. Some classes make masks that no layer uses."""
    try:
        is_known = _is_causal(mask_function, local_size)
    except RuntimeError:  # the rule looks at data
        is_known = False
    mask = torch.empty(1, 1, _POSITIONS, _POSITIONS, device=_META)
    setattr(mask, _RULE, _Rule(local_size, is_known))
    return mask


def _is_causal(allows: Callable[..., Any], window: int | None) -> bool:
    """Whether row q sees exactly (q - window, q], at positions around the window's ends."""
    if window is not None and window < 1:
        return False
    far = 2 * (window or _POSITIONS) + 1
    edges = sorted({at for end in (0, window or 1, far) for at in (end - 1, end, end + 1) if at >= 0})
    for row in edges:
        seen = torch.arange(far + 2)
        found = allows(torch.tensor(0), torch.tensor(0), torch.tensor(row), seen)
        expected = (seen <= row) & (seen > row - (window or far + 2))
        if not torch.equal(torch.as_tensor(found).expand(expected.shape), expected):
            return False
    return True


def cannot_be_built(cls: type[Any], error: BaseException) -> ConfigError:
    """The error to raise where the class `cls` of transformers cannot make a model."""
    return ConfigError(f"{cls.__name__} cannot be built from this config.json: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """The error's class and the beginning of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

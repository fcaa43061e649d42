"""Description of a decoder layer: what it computes and how its weights are named. Families fill it in, and
`common.model.decoder_layer` builds from it.

A value that has no implementation is refused when the model loads. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, TypeVar

from common.base.errors import ConfigError
from common.kv.rank_layout import heads_fit
from common.kv.spec import KVPlane
from common.model.rope import RopeConfig

_T = TypeVar("_T")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
"""Activations of an MLP, by their names in config.json; `common.model.mlp` implements them."""


@dataclass(frozen=True)
class NormDescription:
    """A norm over hidden states. Implemented kinds: `common.model.norms.NORMS`."""

    eps: float
    kind: str = "rms"
    weight_offset: float = 0.0
    """Added to an RMS norm's stored weights."""


class LinearShape(NamedTuple):
    """A linear layer of the whole model. Layers of one name lie in one tensor, one after the other."""

    name: str
    outputs: int
    inputs: int


class Split(NamedTuple):
    """Something that tensor-parallel ranks share."""

    what: str
    fits: Callable[[int], bool]
    """Whether this many ranks can share it."""


@dataclass(frozen=True)
class AttentionDescription(ABC):
    """The attention of a layer, over the whole model. Each kind is a subclass, whose fields are all that decides what it
    computes; implemented kinds: `common.model.attention.ATTENTIONS`."""

    kind: ClassVar[str]
    window: int | None = field(default=None, kw_only=True)
    """Tokens that a row can see; None: all before it."""

    @property
    @abstractmethod
    def planes(self) -> tuple[KVPlane, ...]:
        """The KV cached for each token."""

    @property
    @abstractmethod
    def plane_heads(self) -> int:
        """KV heads of each plane, as `LayerGroup.num_heads`."""

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Width of the vectors that the rotary embedding is applied to."""

    @abstractmethod
    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        """The linear layers of the attention. The description itself knows the weight names that are not in `WeightNames`."""

    @abstractmethod
    def splits(self) -> list[Split]:
        """What tensor-parallel ranks must be able to share."""


@dataclass(frozen=True)
class MultiHeadDescription(AttentionDescription):
    """Query heads, each over the keys and values of a KV head that it may share with its neighbours."""

    kind = "multi_head"
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    """Head dimension of q and k."""
    v_head_dim: int
    scale: float
    """Factor of the products of queries and keys."""
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: NormDescription | None = None
    """Norm over each head of q and k, before rope."""
    joint_norm: NormDescription | None = None
    """Norm over all heads of q together, and over all of k, before rope."""
    soft_cap: float | None = None
    """c in c * tanh(score / c)."""
    has_sinks: bool = False
    """One learned logit per query head takes part in the softmax."""

    @property
    def planes(self) -> tuple[KVPlane, ...]:
        return KVPlane("k", self.head_dim), KVPlane("v", self.v_head_dim)

    @property
    def plane_heads(self) -> int:
        return self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        return [
            LinearShape(names.q, self.num_q_heads * self.head_dim, hidden),
            LinearShape(names.k, self.num_kv_heads * self.head_dim, hidden),
            LinearShape(names.v, self.num_kv_heads * self.v_head_dim, hidden),
            LinearShape(names.output, hidden, self.num_q_heads * self.v_head_dim),
        ]

    def splits(self) -> list[Split]:
        return [
            Split(f"{self.num_q_heads} query heads", lambda ranks: self.num_q_heads % ranks == 0),
            Split(f"{self.num_kv_heads} KV heads", lambda ranks: heads_fit(self.num_kv_heads, ranks)),
        ]


@dataclass(frozen=True)
class MlpDescription:
    """The MLP of a layer. Implemented kinds: `common.model.mlp.MLPS`."""

    inner_size: int
    activation: str
    """A key of `ACTIVATIONS`."""
    bias: bool = False
    kind: str = "gated"

    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        merged = (names.gate, names.up) if self.kind == "gated" else (names.up,)
        outputs = [LinearShape(name, self.inner_size, hidden) for name in merged]
        return [*outputs, LinearShape(names.down, hidden, self.inner_size)]

    def splits(self) -> list[Split]:
        return [Split(f"an MLP of {self.inner_size}", lambda ranks: ranks <= self.inner_size)]

    def active_weights(self, names: WeightNames, hidden: int) -> int:
        """How many weights one token is multiplied by."""
        return sum(each.outputs * each.inputs for each in self.linears(names, hidden))


@dataclass(frozen=True)
class RouterDescription:
    """How a mixture chooses the experts of a token and weighs their outputs: `common.model.mixture.routing`."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """What makes scores of logits; "softmax_of_chosen" takes the softmax over the chosen experts' logits only."""
    normalizes: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor of the weights."""
    has_bias: bool = False
    """Whether a bias is added to the logits."""
    has_selection_bias: bool = False
    """Whether a bias is added to the scores when experts are chosen, but not in their weights."""
    num_groups: int = 1
    groups_kept: int = 1
    """Groups of neighbouring experts that a token's experts are chosen from."""
    group_score_of: int = 2
    """A group's score is the sum of this many of its highest scores."""


@dataclass(frozen=True)
class ClampedGate:
    """min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, -limit, limit) + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's weights in a checkpoint, which follow the layer's name.

    A checkpoint has either modules for each expert, whose names contain {expert}, or stacked tensors of all experts. Equal
    names of stacked gate and up mean that one tensor holds them, one after the other.
    """

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    stacked_gate: str = "mlp.experts.gate_up_proj"
    stacked_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    """Whole names of tensors [experts, out, in]; those of biases, [experts, out], have `.bias` for `.weight`, or add `_bias`."""
    is_interleaved: bool = False
    """Whether outputs of gate and up alternate in their tensor."""
    is_transposed: bool = False
    """Whether stacked weights are stored [experts, in, out]."""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"


USUAL_EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True)
class MixtureDescription:
    """An MLP of experts, a few of which compute each token; the sum of their weighted outputs, and of shared experts that
    compute every token."""

    kind: ClassVar[str] = "mixture"
    router: RouterDescription
    inner_size: int
    """Inner features of each expert."""
    activation: str = "silu"
    """A key of `ACTIVATIONS`."""
    clamp: ClampedGate | None = None
    """What takes the place of activation(gate) * up."""
    bias: bool = False
    """Of the experts' linear layers."""
    shared_inner_size: int = 0
    """Of all shared experts together, which are one gated MLP; 0: there are none."""
    expert_names: ExpertNames = USUAL_EXPERT_NAMES

    @property
    def shared(self) -> MlpDescription | None:
        """The shared experts."""
        return MlpDescription(self.shared_inner_size, self.activation) if self.shared_inner_size else None

    def linears(self, names: WeightNames, hidden: int) -> list[LinearShape]:
        """The linear layers that adapters can change: those of the shared experts."""
        return [] if self.shared is None else self.shared.linears(self.shared_names(names), hidden)

    def shared_names(self, names: WeightNames) -> WeightNames:
        """`names`, in which gate, up and down are those of the shared experts."""
        own = self.expert_names
        return replace(names, gate=own.shared_gate, up=own.shared_up, down=own.shared_down)

    def splits(self) -> list[Split]:
        """Each rank holds whole experts."""
        experts = self.router.num_experts
        shared = [] if self.shared is None else self.shared.splits()
        return [Split(f"{experts} experts", lambda ranks: ranks <= experts), *shared]

    def active_weights(self, names: WeightNames, hidden: int) -> int:
        """How many weights one token is multiplied by."""
        router = self.router
        shared = sum(each.outputs * each.inputs for each in self.linears(names, hidden))
        return hidden * (router.num_experts + router.top_k * 3 * self.inner_size) + shared


@dataclass(frozen=True)
class LayerDescription:
    """x + attention(norm(x)), then x + mlp(norm(x)), where `norm_at` is "input"."""

    attention: AttentionDescription
    mlp: MlpDescription | MixtureDescription
    norm: NormDescription
    rope: RopeConfig | None = None
    """How q and k are rotated; None: not at all."""
    norm_at: Literal["input", "output", "both"] = "input"
    """Whether norms are over the inputs of attention and MLP, over their outputs, before these are added to x, or both."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP."""

    def splits(self) -> list[Split]:
        """What tensor-parallel ranks must be able to share."""
        return [*self.attention.splits(), *self.mlp.splits()]

    def for_context(self, max_model_len: int) -> LayerDescription:
        """The same layer for contexts of at most this many tokens."""
        return self if self.rope is None else replace(self, rope=self.rope.for_context(max_model_len))


def multi_head(layer: LayerDescription) -> MultiHeadDescription:
    """The attention of a layer of a model that has no other kind."""
    assert isinstance(layer.attention, MultiHeadDescription), layer.attention.kind
    return layer.attention


@dataclass(frozen=True)
class PositionsDescription:
    """A matrix [rows, hidden]; row (position + offset) is added to a token's embedding."""

    rows: int
    offset: int = 0


@dataclass(frozen=True)
class EndsDescription:
    """The parts before the first layer and after the last one."""

    embedding_multiplier: float = 1.0
    is_multiplier_rounded: bool = False
    """Whether `embedding_multiplier` is rounded to the weights' dtype."""
    positions: PositionsDescription | None = None
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    """c in c * tanh(logit / c)."""


@dataclass(frozen=True)
class WeightNames:
    """Names of modules in a checkpoint; their tensors add `.weight` and `.bias`. Names of a layer's parts follow `layer`.

    Equal names of q, k and v, or of gate and up, mean that one tensor holds them, one after the other.
    """

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    layer: str = "model.layers.{number}"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    """The whole name of a tensor."""
    output: str = "self_attn.o_proj"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    is_transposed: bool = False
    """Whether weights of linear layers are stored [in, out]."""
    other_beginnings: tuple[tuple[str, str], ...] = ()
    """(beginning of names, what some checkpoints have in its place)."""


USUAL_NAMES = WeightNames()
USUAL_ENDS = EndsDescription()


def implementation(what: str, kind: str, known: dict[str, _T]) -> _T:
    """The entry of `known` that a description asks for by name. Raises: ConfigError if there is none."""
    if kind not in known:
        raise ConfigError(
            f"the model needs the {what} {kind!r}, which is not implemented; implemented: {', '.join(known)}"
        )
    return known[kind]

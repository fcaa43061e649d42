"""The messages of control links, and the node record. `common.control.codec` packs and checks them.

    router -> node      PrefillRequest, DecodeRequest, PoolRequest, Abort, Ping
    node -> router      TokenBatch (of TokenChunk), PoolResult, AttemptFailed, Pong
    prefill -> decode   Offer, PrefillDone, TransferAbort            (leader to leader)
    decode -> prefill   Grant, TransferAbort, TransferReceived       (leader to leader)
    node -> Redis       NodeRecord

Types with many instances per request are named tuples, because these are smaller on the wire than dataclasses. Every message
about a request contains its `AttemptKey`, so that late messages of an older attempt are recognised and dropped.

A field that is added is marked with the protocol version that it appears in (`common.control.versions`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from common.base.message_types import Since, StrictFields
from common.config.option_groups import CapacityOptions
from common.control.identities import Adapter, AttemptKey, Ids, PeerRef, pack_ids
from common.control.node_reports import AttemptStats, NodeLoad
from common.control.pooling import PoolRequest, PoolResult
from common.kv.rank_layout import KVLayout

MAX_PREDICTION = 2**17
"""Maximum tokens of `EngineRequest.prediction`."""


class Grammar(NamedTuple):
    """The grammar that the answer must match. The router makes and validates it (`router.structured`)."""

    source: str
    """Text of the grammar, as llguidance's `LLMatcher` takes it."""
    after: list[int] = []
    """The grammar applies after the first occurrence of these tokens among the generated ones; empty: from the first token."""


WHOLE_VOCABULARY = -1
"""In place of a number of most likely tokens: all tokens."""


class SamplingParams(NamedTuple):
    """How the next token is sampled, in terms of token ids. The router applies the rules about text, such as stop strings.

    `seed` is always set: the router draws one if the client gave none, so that the token at position i depends only on
    the logits and (seed, i), in every attempt and at every node.
    """

    seed: int
    max_tokens: int
    """Maximum number of generated tokens over all attempts."""
    temperature: float = 1.0
    """0 means greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that the token was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or generated before."""
    logit_bias: list[tuple[int, float]] = []
    """(token id, value added to its logit). Nothing may change the list, like everything in messages."""
    min_tokens: int = 0
    """Before this many tokens are generated, no token of `stop_token_ids` can be sampled."""
    stop_token_ids: list[int] = []
    """The client's stop tokens, and the model's end-of-sequence ids unless `ignore_eos`."""
    logprobs: int | None = None
    """n: return log-probabilities of the sampled token and of the n most likely ones, or of all (`WHOLE_VOCABULARY`); None:
    return none."""
    allowed_token_ids: Ids = pack_ids()
    """If not empty, only these tokens can be sampled."""
    bad_words: list[Ids] = []
    """Token sequences that must not be generated: after all tokens but the last of one, its last token cannot be sampled."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    grammar: Grammar | None = None
    """At each position it allows the tokens with which the answer can still match it. It overrides `min_tokens` if it leaves
    only stop tokens."""
    logprob_token_ids: list[int] = []
    """If not empty, log-probabilities are those of these tokens, of which there are `logprobs`, instead of the most likely ones."""


class EngineRequest(NamedTuple):
    """Everything that an engine must know about a client's request, from the router to the engine's sequence.

    A new property of requests is a field here; the messages to both nodes and `Sequence` contain the whole record.
    """

    prompt_ids: Ids
    sampling: SamplingParams
    cache_salt: str = ""
    """Prompts share cached blocks only with prompts of the same salt."""
    priority: int = 0
    """Requests with lower values run earlier, equal ones in order of arrival."""
    adapter: Adapter | None = None
    """Both nodes apply it to every token of the request."""
    timeline: bool = False
    """Whether both nodes report their events with times, in `AttemptStats.timeline`."""
    prediction: Ids = pack_ids()
    """Tokens that the client expects in the answer: a decode node may draft from them. They change no token of the answer."""
    tenant: str = ""
    """A hash of the name of the tenant whose share of a node's sequence slots and KV blocks it takes."""

    @property
    def lora_id(self) -> str:
        """The adapter's id for `root_hash`; empty without an adapter."""
        return self.adapter.lora_id if self.adapter else ""


# ---------------------------------------------------------------- router -> node


class PrefillRequest(NamedTuple):
    """Asks a node to compute the KV of `token_ids`, relay it to `decode` and sample one token."""

    key: AttemptKey
    request: EngineRequest
    generated_ids: Ids
    """Tokens of earlier attempts, which the client already has."""
    decode: PeerRef
    timeout_s: float
    """Time after arrival when the node gives up and frees everything without an answer."""

    @property
    def token_ids(self) -> array[int]:
        """The prompt, then the tokens of earlier attempts."""
        return self.request.prompt_ids + self.generated_ids


class DecodeRequest(NamedTuple):
    """Asks a node to generate after `token_ids`, whose KV comes from `prefill`, or from this node itself if that is None."""

    key: AttemptKey
    request: EngineRequest
    generated_ids: Ids
    """Tokens of earlier attempts, which the client already has."""
    prefill: PeerRef | None
    timeout_s: float
    """Time after arrival when the node gives up and frees everything without an answer."""

    @property
    def token_ids(self) -> array[int]:
        """The prompt, then the tokens of earlier attempts."""
        return self.request.prompt_ids + self.generated_ids


@dataclass(frozen=True)
class Abort(StrictFields):
    """Asks a node to stop an attempt and free its resources. There is no answer; unknown keys are ignored."""

    key: AttemptKey


@dataclass(frozen=True)
class Ping(StrictFields):
    """Renews the lease of a router, or of a prefill node, at a node. Without a ping for `lease_s`, the node ends all attempts
    of that router or node.

    `router_id`: the sender's name, also that of a prefill node. `lease_s` 0 only asks for a `Pong` (health probe), without a
    lease.
    """

    router_id: str
    lease_s: float


# ---------------------------------------------------------------- node -> router


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one generated position: of the sampled token and of the most likely ones."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    whole: Annotated[bytes, Since(17)] = b""
    """Log-probabilities of all tokens, packed by `common.control.whole_vocabulary`, in place of the two lists; empty without."""


def items_of(num_tokens: int, num_likely: int | None, whole_bytes: int = 0) -> int:
    """Estimate the MessagePack items of `num_tokens` tokens with `num_likely` most likely ones each; None means no
    log-probabilities. `whole_bytes` of packed ones for each count as items, so that a message stays small in bytes too."""
    return num_tokens * (1 if num_likely is None else 7 + 2 * num_likely + whole_bytes // 1024)


class PromptLogprobs(NamedTuple):
    """Log-probabilities at one position of the prompt: of the prompt's own token and of the most likely ones."""

    logprob: float
    rank: int
    """Number of tokens that are at least as likely as the prompt's own; 1 means that none is more likely."""
    top_ids: list[int]
    top_logprobs: list[float]
    whole: Annotated[bytes, Since(17)] = b""
    """Log-probabilities of all tokens in place of the two lists, as in `TokenLogprobs`."""


FinishReason = Literal["stop", "length"]


class TokenChunk(NamedTuple):
    """Tokens generated for one attempt. A chunk with a `finish_reason` is the attempt's last message."""

    key: AttemptKey
    start: int
    """Index of the first of `token_ids` among all generated tokens of the request, or of the first of `prompt_logprobs`."""
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stats: AttemptStats | None = None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Item i is about prompt token i + 1. Such a chunk contains nothing else; the node that computes the prompt sends all such
    chunks, in order, before its first token."""
    drafted: int = 0
    """Draft tokens that the step verified for the attempt."""
    accepted: int = 0
    """How many of `drafted` were right; these tokens are in `token_ids`."""
    preemptions: int = 0
    """How often the sequence was preempted; in the attempt's last message."""


@dataclass(frozen=True)
class TokenBatch(StrictFields):
    """All tokens that one step generated for one router."""

    chunks: list[TokenChunk]


@dataclass(frozen=True)
class AttemptFailed(StrictFields):
    """A node's last message about an attempt that it did not finish. `code` is from `common.base.errors`."""

    key: AttemptKey
    code: str
    message: str


@dataclass(frozen=True)
class Pong(StrictFields):
    """The answer to a `Ping`, with the node's load."""

    node_id: str
    incarnation: str
    load: NodeLoad


# ---------------------------------------------------------------- prefill leader <-> decode leader


@dataclass(frozen=True)
class Offer(StrictFields):
    """The prefill node is about to compute this attempt and asks where to send its KV."""

    key: AttemptKey
    src: PeerRef
    layout: KVLayout
    num_tokens: int
    last_hash: bytes
    """Hash of the sequence's last block, partial or full. Only equal sequences have equal hashes (`common.base.hashing`)."""


@dataclass(frozen=True)
class Grant(StrictFields):
    """The decode node has allocated blocks. Lists have one entry per block table of a sequence (`KVSpec.num_tables`)."""

    key: AttemptKey
    dst: PeerRef
    layout: KVLayout
    first_blocks: list[int]
    """Index of the first block to send. The decode node has the earlier ones, or never reads them (sliding windows)."""
    block_ids: list[Ids]
    """Destination of every block of the sequence, in order. One-sided transports write there, beginning at the first block to
    send."""
    protocol: Annotated[int, Since(17)] = 16
    """The newest protocol version in which the decode node's ranks read the headers of slices."""


@dataclass(frozen=True)
class PrefillDone(StrictFields):
    """Tells the decode node the first token. With a `finish_reason`, the request has ended."""

    key: AttemptKey
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class TransferReceived(StrictFields):
    """Tells the prefill node that all slices of the transfer have arrived and are verified."""

    key: AttemptKey
    bytes_received: int


@dataclass(frozen=True)
class TransferAbort(StrictFields):
    """Tells the other end that the sender aborts the transfer. `code` is from `common.base.errors`."""

    key: AttemptKey
    code: str
    message: str


# ---------------------------------------------------------------- node -> Redis

Role = Literal["prefill", "decode"]
Task = Literal["generate", "embed", "score"]
"""What a model does: generate text, embed texts, or score pairs of texts (a cross-encoder)."""


@dataclass(frozen=True)
class ModelInfo(StrictFields):
    """The facts about a node's model that a router needs."""

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    """Maximum number of prompt and generated tokens together."""
    tokenizer: str = ""
    """Digest of the tokenizer's file (`common.model.fingerprint`); empty if the model folder has none."""
    task: Task = "generate"
    hidden_size: int = 0
    """Width of a vector, for models that embed."""


@dataclass(frozen=True)
class NodeRecord(StrictFields):
    """A node's registration. It stays in Redis as long as the node renews its lease."""

    role: Role
    peer: PeerRef
    model: ModelInfo
    layout: KVLayout
    kv_blocks_total: int
    """KV blocks of one block table, as in `NodeLoad`."""
    started_at: float
    """Unix time in seconds."""
    max_num_seqs: Annotated[int, Field(ge=1)] = CapacityOptions.max_num_seqs
    """Maximum number of concurrent sequences."""
    admin_address: str = ""
    """URL of the node's admin port; empty if it has none."""
    kernels: str = ""
    """Name of the kernels that compute the node's steps, for operators."""
    adapters: list[Adapter] = field(default_factory=list[Adapter])
    """The LoRA adapters that the node serves."""
    adapter_paths: dict[str, str] = field(default_factory=dict[str, str])
    """Where the node has read each of them from, by name."""
    lease_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """The node's `--lease-s`, in which it renews this record at least three times."""


Message = (
    PrefillRequest
    | DecodeRequest
    | PoolRequest
    | Abort
    | Ping
    | TokenBatch
    | PoolResult
    | AttemptFailed
    | Pong
    | Offer
    | Grant
    | PrefillDone
    | TransferReceived
    | TransferAbort
    | NodeRecord
)

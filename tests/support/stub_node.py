"""Fake prefill and decode nodes for tests and benchmarks of the router: the real protocol over the real
control links, without an engine. Answers come from a script: the token at index i of any request is `script(i)`.

Runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from support.stub_pooling import pooled
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.base.errors import BadRequest, Unavailable
from common.config.service_configs import RouterConfig
from common.control.links import Identity, Server
from common.control.messages import (
    Abort,
    Adapter,
    AttemptFailed,
    AttemptKey,
    AttemptStats,
    DecodeRequest,
    FinishReason,
    Message,
    ModelInfo,
    NodeLoad,
    NodeRecord,
    PeerRef,
    Ping,
    Pong,
    PrefillRequest,
    PromptLogprobs,
    Role,
    Task,
    TokenBatch,
    TokenChunk,
    TokenLogprobs,
)
from common.control.pooling import PoolRequest, PoolResult
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.security.tls import Credentials
from router.http.response_store import ResponseStore
from router.http.server import bind, http_server
from router.router import Router

MAX_LEN = 512
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model_folder(folder: Path, *, vocab_size: int = 400) -> Path:
    """A model folder without weights: a byte-level tokenizer, a chat template, a Llama config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, again and again."] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, **flags},
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "eos_token_id": tokenizer.token_to_id("</s>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@dataclass
class Sequence:
    """One request at a node."""

    identity: Identity
    request: PrefillRequest | DecodeRequest
    generated: int
    """Tokens known, by all attempts and legs."""

    to_score: int | None = None
    """What is to be sent of `SamplingParams.prompt_logprobs`."""

    @property
    def key(self) -> AttemptKey:
        return self.request.key


def prompt_logprobs(token: int, count: int) -> PromptLogprobs:
    """The stub's log-probabilities of a prompt token."""
    others = [token + 1 + i for i in range(count)]
    return PromptLogprobs(-0.25, count + 1, others, [-1.0 - i for i in range(count)])


@dataclass
class StubNode:
    """One node. With `automatic` it answers by script as soon as `gate` is open; else the test calls `step`."""

    role: Role
    node_id: str
    model_path: str = ""
    script: Callable[[int], int] = lambda index: 65 + index % 26
    automatic: bool = True
    step_s: float = 0.0
    pings_answered: bool = True
    step_age_s: float = 0.0
    draining: bool = False
    max_len: int = MAX_LEN
    fingerprint: str = "stub"
    vocab_size: int = 400
    cached_tokens: int = 0
    max_num_seqs: int = 64
    prefill_s: float | None = None
    """The statistics reported with every computed prompt; None: nothing that a router could learn from."""
    task: Task = "generate"
    hidden_size: int = 0
    model_name: str = "stub-model"
    adapters: list[Adapter] = field(default_factory=list)
    adapter_paths: dict[str, str] = field(default_factory=dict)
    fail_with: tuple[str, str] | None = None
    """(code, message) with which every request is refused."""
    running: dict[AttemptKey, Sequence] = field(default_factory=dict)
    pooling: dict[AttemptKey, tuple[Identity, PoolRequest]] = field(default_factory=dict)
    received: list[Message] = field(default_factory=list)
    remembers: bool = True
    """Whether `received` is kept and `until` works; disable it for thousands of requests per second."""
    credentials: Credentials | None = None
    """For mutual TLS."""

    def __post_init__(self) -> None:
        self.incarnation = secrets.token_hex(4)
        self.started_at = time.time()
        self.gate = asyncio.Event()
        self.gate.set()
        self._news = asyncio.Event()
        self._changed = asyncio.Condition()
        self._server = Server("127.0.0.1", 0, self._on_message, self.credentials)
        self._loop = asyncio.get_running_loop().create_task(self._run())
        self._notes: set[asyncio.Task[None]] = set()

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.node_id, self.incarnation, self._server.address, [])

    @property
    def record(self) -> NodeRecord:
        layout = KVLayout(self.fingerprint, KVSpec.uniform(2, 2, 16, "float32"))
        of_model = {"task": self.task, "hidden_size": self.hidden_size}
        model = ModelInfo(self.model_name, self.model_path, self.vocab_size, self.max_len, **of_model)
        lora = {"adapters": list(self.adapters), "adapter_paths": self.adapter_paths}
        return NodeRecord(self.role, self.peer, model, layout, 1000, self.started_at, self.max_num_seqs, **lora)

    def requests(self) -> list[PrefillRequest | DecodeRequest]:
        """The requests received, in order."""
        return [message for message in self.received if isinstance(message, PrefillRequest | DecodeRequest)]

    def aborts(self) -> list[AttemptKey]:
        """The aborts received, in order."""
        return [message.key for message in self.received if isinstance(message, Abort)]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until `condition` holds; it is looked at after every message received."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    def step(self) -> int:
        """Generate one token for every running sequence, or pool what came first. Returns the number of sequences."""
        for key, (identity, request) in list(self.pooling.items())[:1]:
            del self.pooling[key]
            self._server.send(identity, PoolResult(key, pooled(request, self.task, self.hidden_size)))
            return 1
        batches: dict[Identity, list[TokenChunk]] = {}
        for sequence in list(self.running.values()):
            of_router = batches.setdefault(sequence.identity, [])
            if sequence.to_score is not None:
                found = [prompt_logprobs(token, sequence.to_score) for token in sequence.request.token_ids[1:]]
                of_router.append(TokenChunk(sequence.key, 0, [], prompt_logprobs=found))
                sequence.to_score = None
            of_router.append(self._next_chunk(sequence))
        for identity, chunks in batches.items():
            with contextlib.suppress(Unavailable):
                self._server.send(identity, TokenBatch(chunks))
        return sum(len(chunks) for chunks in batches.values())

    def say(self, sequence: Sequence, message: Message) -> None:
        """Send a message about a sequence."""
        self._server.send(sequence.identity, message)

    def fail(self, key: AttemptKey, code: str, text: str = "scripted") -> None:
        """Report the failure of one sequence."""
        sequence = self.running.pop(key)
        self.say(sequence, AttemptFailed(key, code, text))

    async def close(self) -> None:
        """Break the connection without a message, as a crash does."""
        self._loop.cancel()
        await asyncio.gather(self._loop, *self._notes, return_exceptions=True)
        await self._server.close()

    def _next_chunk(self, sequence: Sequence) -> TokenChunk:
        sampling = sequence.request.request.sampling
        index = sequence.generated
        token = self.script(index)
        sequence.generated += 1
        finish: FinishReason | None = None
        if token in sampling.stop_token_ids and index >= sampling.min_tokens:
            finish = "stop"
        elif sequence.generated >= min(sampling.max_tokens, self.max_len - len(sequence.request.request.prompt_ids)):
            finish = "length"
        logprobs = None
        if sampling.logprobs is not None:
            others = [token + 1 + i for i in range(sampling.logprobs)]
            logprobs = [TokenLogprobs(-0.5, others, [-1.0 - i for i in range(sampling.logprobs)])]
        last = finish is not None or self.role == "prefill"
        stats = self._stats(sequence) if last else None
        if last:
            self.running.pop(sequence.key, None)
        return TokenChunk(sequence.key, index, [token], logprobs, finish, stats)

    def _stats(self, sequence: Sequence) -> AttemptStats:
        stats = AttemptStats(cached_tokens=self.cached_tokens, relayed_bytes=4096, prefill_s=0.01)
        if self.prefill_s is None:
            return stats
        return stats._replace(prefill_s=self.prefill_s, computed_tokens=len(sequence.request.token_ids))

    def _on_message(self, identity: Identity, message: Message) -> None:
        match message:
            case Ping():
                if self.pings_answered:
                    running = len(self.running) + len(self.pooling)
                    load = NodeLoad(
                        running=running, kv_blocks_total=1000, step_age_s=self.step_age_s, draining=self.draining
                    )
                    self._server.send(identity, Pong(self.node_id, self.incarnation, load))
                return
            case PrefillRequest() | DecodeRequest():
                known = len(message.generated_ids)
                if isinstance(message, DecodeRequest) and message.prefill is not None:
                    known += 1  # the prefill node's
                too_long = len(message.token_ids) >= self.max_len
                if refusal := (BadRequest.code, "too long") if too_long else self.fail_with:
                    self._server.send(identity, AttemptFailed(message.key, *refusal))
                elif known < message.request.sampling.max_tokens:
                    computes = isinstance(message, PrefillRequest) or message.prefill is None
                    to_score = message.request.sampling.prompt_logprobs if computes else None
                    self.running[message.key] = Sequence(identity, message, known, to_score)
                self._news.set()
            case PoolRequest(key):
                if self.fail_with is not None:
                    self._server.send(identity, AttemptFailed(key, *self.fail_with))
                else:
                    self.pooling[key] = identity, message
                self._news.set()
            case Abort(key):
                self.running.pop(key, None)
                self.pooling.pop(key, None)
            case _:
                pass
        if not self.remembers:
            return
        self.received.append(message)
        note = asyncio.get_running_loop().create_task(self._note())
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        while self.automatic:
            await self.gate.wait()
            if not self.step():
                self._news.clear()
                await self._news.wait()
            await asyncio.sleep(self.step_s)


@dataclass
class Stack:
    """A router with its HTTP server and the nodes it knows."""

    router: Router
    port: int
    nodes: list[StubNode]
    _server: uvicorn.Server
    _tasks: list[asyncio.Task[None]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def list_nodes(self, *nodes: StubNode) -> None:
        """Set the nodes that membership lists from now on."""
        self.nodes = list(nodes)
        self.router.set_nodes([node.record for node in nodes])

    async def pools(self, count: int) -> None:
        """Wait until exactly this many nodes of pooling models are usable and their models are known."""
        table = self.router.dispatcher.nodes
        async with asyncio.timeout(10):
            while table.num_pooling != count or not self._models_known():
                await asyncio.sleep(0.002)

    def _models_known(self) -> bool:
        router = self.router
        names = {node.record.model.name for node in router.dispatcher.nodes.known() if node.usable}
        return bool(router.catalog.models) and names <= {model.base for model in router.catalog.models}

    async def usable(self, prefill: int, decode: int) -> None:
        """Wait until exactly this many nodes are usable and their models are known."""
        table = self.router.dispatcher.nodes
        async with asyncio.timeout(10):
            while (
                len(table.usable("prefill")) != prefill
                or len(table.usable("decode")) != decode
                or not self._models_known()
            ):
                await asyncio.sleep(0.002)

    async def settled(self) -> None:
        """Wait until no request is left anywhere, then check that every counter is back at zero."""
        async with asyncio.timeout(20):
            while self.router.dispatcher.running or any(node.running or node.pooling for node in self.nodes):
                await asyncio.sleep(0.002)
        assert self.router.dispatcher.waiting == 0
        for node in self.router.dispatcher.nodes.known():
            assert not node.legs, node.node_id


@contextlib.asynccontextmanager
async def running_stack(
    config: RouterConfig, *nodes: StubNode, responses: ResponseStore | None = None
) -> AsyncIterator[Stack]:
    """A router on a free port without Redis (except for `responses`), told of `nodes`; closes them all."""
    sock = bind("127.0.0.1", 0)
    router = Router(config)
    await router.catalog.load_configured()
    server = http_server(router, config, None, responses)
    tasks: list[asyncio.Task[None]] = [
        asyncio.create_task(server.serve(sockets=[sock])),
        asyncio.create_task(router.dispatcher.run()),
    ]
    stack = Stack(router, sock.getsockname()[1], [], server, tasks)
    try:
        stack.list_nodes(*nodes)
        while not server.started:
            await asyncio.sleep(0.002)
        if roles := [node.role for node in nodes if node.pings_answered and node.task == "generate"]:
            await stack.usable(roles.count("prefill"), roles.count("decode"))
        if pools := sum(node.task != "generate" for node in nodes):
            await stack.pools(pools)
        yield stack
    finally:
        router.dispatcher.fail_all(Unavailable("the test is over"))
        server.stop()
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        router.close()
        for node in {id(node): node for node in [*nodes, *stack.nodes]}.values():
            await node.close()

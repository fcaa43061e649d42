"""The engines of a prefill and a decode node on separate hosts, connected only by the project's transport. Worker classes.

The source computes a prompt in chunks and tells its sender about every layer as it becomes final or, for comparison,
about all layers once the first token is known. The destination draws the second token from the KV that arrived.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from support.single_transport import zmq_receiver, zmq_sender

from common.base.device import configure_torch
from common.base.hashing import BLOCK_SIZE, hash_blocks, root_hash
from common.config.service_configs import DecodeConfig, NodeConfig, PrefillConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef, SamplingParams
from common.engine.executor import LocalExecutor
from common.engine.kv_transfer import (
    GrantOrder,
    OpenDestinationOrder,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferEvent,
    TransferPlan,
)
from common.engine.step import RelayProgress, SampleSpec, StepInput
from common.kv.rank_layout import blocks_for
from common.node.plan import plan_node
from common.node.worker import Worker, load_worker
from common.parallel.mesh import SOLO

_TIMEOUT_S = 60.0
_GREEDY = SamplingParams(seed=0, max_tokens=1 << 30, temperature=0.0)


class _Engine:
    """One loaded model. Every prompt lies in blocks 0, 1, 2, ... of its KV storage."""

    def __init__(self, config: NodeConfig) -> None:
        configure_torch(config.threads)
        self.plan = plan_node(config)
        self.worker: Worker = load_worker(self.plan, SOLO, small_batches=False)
        self.worker.allocate_kv(self.worker.max_blocks)
        self.layout = self.plan.layout
        self.executor = LocalExecutor(self.worker.runner)
        self.changed = threading.Condition()
        self.over: dict[AttemptKey, tuple[float, Exception | None]] = {}
        """When the transfer ended at this end, and with what error."""

    def key(self, number: int) -> AttemptKey:
        return AttemptKey("bench", number)

    def prompt(self, number: int, tokens: int) -> list[int]:
        """The same at both ends."""
        rng = random.Random(number)
        return [rng.randrange(256, self.plan.model.vocab_size) for _ in range(tokens)]

    def hashes(self, prompt: list[int]) -> list[bytes]:
        return hash_blocks(root_hash(self.layout.fingerprint), prompt, include_partial=True)

    def step(self, rows: list[int], start: int, relay: list[RelayProgress], *, draw: bool) -> StepInput:
        """The step that computes `rows` from position `start` on."""
        stop = start + len(rows)
        return StepInput(
            step_id=stop,
            token_ids=rows,
            positions=list(range(start, stop)),
            slot_mapping=[list(range(start, stop))],
            query_lens=[len(rows)],
            context_lens=[stop],
            block_tables=[[list(range(blocks_for(stop)))]],
            samples=[SampleSpec(0, len(rows) - 1, _GREEDY, stop, 0)] if draw else [],
            relay=relay,
        )

    def second(self, tokens: int, first: int) -> int:
        """The token after `first`, which follows a prompt of `tokens`."""
        output = self.executor.submit(self.step([first], tokens, [], draw=True))
        return output.sampled[0].token_id

    def ended(self, key: AttemptKey, error: Exception | None) -> None:
        """On the transport's thread."""
        with self.changed:
            self.over[key] = (time.perf_counter(), error)
            self.changed.notify_all()

    def wait(self, key: AttemptKey) -> float:
        """When the transfer ended here. Raises: RuntimeError."""
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.over, _TIMEOUT_S):
                raise RuntimeError(f"{key} did not end within {_TIMEOUT_S:.0f} s")
        ended_s, error = self.over[key]
        if error is not None:
            raise RuntimeError(str(error)) from error
        return ended_s


class OverlapSource(_Engine):
    """The prefill side."""

    def __init__(self, chunk: int, **config: Any) -> None:
        super().__init__(PrefillConfig(**config))
        self._chunk = chunk
        self._sender = zmq_sender(self.worker.storage, self.layout, 0, self._on_event, incarnation="0" * 16)
        self._layer_wise = LocalExecutor(self.worker.runner, self._sender.blocks_final)

    def _on_event(self, event: TransferEvent) -> None:
        if isinstance(event, SourceReleased):
            self.ended(event.key, event.error)

    def prefill(self, number: int, tokens: int, address: str, layer_wise: bool) -> dict[str, Any]:
        """Compute a prompt that is granted from the start. Returns the first token, and when (`time.perf_counter`)
        the computing began and the token was there."""
        key, prompt = self.key(number), self.prompt(number, tokens)
        blocks = list(range(blocks_for(tokens)))
        plan, dst = (
            TransferPlan(key, [blocks], [0], self.hashes(prompt), _TIMEOUT_S),
            PeerRef("dst", "1" * 16, "none", [address]),
        )
        self._sender.apply(OpenSourceOrder(plan))
        self._sender.apply(GrantOrder(Grant(key, dst, self.layout, [0], [pack_ids(blocks)])))
        executor = self._layer_wise if layer_wise else self.executor
        first = -1
        started = time.perf_counter()
        for at in range(0, tokens, self._chunk):
            rows = prompt[at : at + self._chunk]
            last = at + len(rows) == tokens
            final = len(blocks) if last else (at + len(rows)) // BLOCK_SIZE
            relay = [RelayProgress(key, final)] if layer_wise else []
            output = executor.submit(self.step(rows, at, relay, draw=last))
            if last:
                first = output.sampled[0].token_id
        first_s = time.perf_counter()
        if not layer_wise:
            for layer in range(self.layout.spec.num_layers):
                self._sender.blocks_final(key, layer, len(blocks))
        return {"first": first, "started": started, "first_s": first_s}

    def released(self, number: int, tokens: int, first: int) -> int:
        """Wait until all is sent; returns the second token as this side would draw it."""
        self.wait(self.key(number))
        return self.second(tokens, first)

    def close(self) -> None:
        """Stop the transport."""
        self._sender.close()


class OverlapDestination(_Engine):
    """The decode side; `bind` is its address."""

    def __init__(self, bind: str, **config: Any) -> None:
        super().__init__(DecodeConfig(**config))
        self._receiver = zmq_receiver(
            self.worker.storage, self.layout, 0, self._on_event, host=bind, incarnation="1" * 16
        )

    def _on_event(self, event: TransferEvent) -> None:
        if isinstance(event, ReceiveFailed):
            self.ended(event.key, event.error)
        elif isinstance(event, Received):
            self.ended(event.key, None)

    def address(self) -> str:
        """Where to send."""
        return self._receiver.address

    def expect(self, number: int, tokens: int) -> None:
        """Open the transfer of that prompt; the former content of its blocks is cleared."""
        self.worker.storage.groups[0].stacked.zero_()
        prompt = self.prompt(number, tokens)
        src, blocks = PeerRef("src", "0" * 16, "none", []), list(range(blocks_for(tokens)))
        plan = TransferPlan(self.key(number), [blocks], [0], self.hashes(prompt), _TIMEOUT_S)
        self._receiver.apply(OpenDestinationOrder(plan, src, self.layout))

    def second_token(self, number: int, tokens: int, first: int) -> dict[str, Any]:
        """Wait for the KV, then draw the second token. Returns it, and when the KV, the step and the token were there."""
        received_s = self.wait(self.key(number))
        step_s = time.perf_counter()
        token = self.second(tokens, first)
        return {"second": token, "received_s": received_s, "step_s": step_s, "second_s": time.perf_counter()}

    def close(self) -> None:
        """Stop the transport."""
        self._receiver.close()

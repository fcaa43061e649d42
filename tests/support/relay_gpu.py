"""Two processes that relay KV on one GPU: the receiving one is a child."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import queue
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.config.service_configs import DecodeConfig, PrefillConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    GrantOrder,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    Received,
    SourceReleased,
    TransferPlan,
)
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.factory import make_end

DEADLINE_S = 60.0


def hashes_of(count: int) -> list[bytes]:
    """Block hashes that both ends derive alike."""
    return [i.to_bytes(16, "little") for i in range(count)]


def random_storage(kv: KVLayout, rank: int, num_blocks: int, seed: int, device: str = "cuda") -> KVStorage:
    """KV memory with random bytes."""
    storage = KVStorage(kv, kv.shards()[rank], num_blocks, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    held = storage.groups[0].stacked.view(torch.uint8)
    held.copy_(torch.randint(0, 256, held.shape, dtype=torch.uint8, device=device, generator=generator))
    return storage


def digest(storage: KVStorage, blocks: list[int]) -> str:
    """A digest of all bytes in these blocks."""
    held = storage.groups[0].stacked.view(torch.uint8)[:, :, blocks].cpu().contiguous()
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()


def _receive(pipe: Connection, kv: KVLayout, num_blocks: int, transport: str, device: str) -> None:
    """The child process: carries out one order after the other."""
    storage = random_storage(kv, 0, num_blocks, 2, device)
    if storage.groups[0].stacked.is_cuda:
        torch.cuda.set_device(storage.groups[0].stacked.device)
        torch.cuda.synchronize()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_event(event: Any) -> None:
        if not isinstance(event, Opened):
            events.put(event)

    config = DecodeConfig(kv_transport=transport)  # type: ignore[arg-type]
    receiver = make_end(config, storage, kv, 0, on_event, incarnation="dst-1", listen_port=0)
    pipe.send(receiver.address)
    while (order := pipe.recv()) is not None:
        kind, value = order
        match kind:
            case "open":
                pipe.send(receiver.apply(value))
            case "abort":
                pipe.send(receiver.apply(AbortOrder(value)))
            case "next event":
                event = events.get(timeout=DEADLINE_S)
                pipe.send((type(event).__name__, str(getattr(event, "error", ""))))
            case _:
                pipe.send(digest(storage, value))
    receiver.close()


class GpuPair:
    """A prefill rank here, a decode rank in a child process, each on its device."""

    def __init__(
        self, kv: KVLayout, num_blocks: int, transport: str = "auto", devices: tuple[str, str] = ("cuda:0", "cuda:0")
    ) -> None:
        self.kv = kv
        self.storage = random_storage(kv, 0, num_blocks, 1, devices[0])
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        config = PrefillConfig(kv_transport=transport)  # type: ignore[arg-type]
        self.sender = make_end(config, self.storage, kv, 0, self.events.put, incarnation="src-1")
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.child = context.Process(target=_receive, args=(theirs, kv, num_blocks, transport, devices[1]), daemon=True)
        self.child.start()
        theirs.close()
        self.address = self._hear()

    def ask(self, kind: str, value: object = None) -> Any:
        """Send an order to the child and return its answer."""
        self.pipe.send((kind, value))
        return self._hear()

    def open(
        self, key: AttemptKey, src_blocks: list[int], dst_blocks: list[int], timeout_s: float = DEADLINE_S
    ) -> None:
        """Open both ends and grant the transfer."""
        hashes = hashes_of(len(src_blocks))
        source = PeerRef("p", "src-1", "", [])
        there = TransferPlan(key, [dst_blocks], [0], hashes, timeout_s)
        self.ask("open", OpenDestinationOrder(there, source, self.kv))
        self.sender.apply(OpenSourceOrder(TransferPlan(key, [src_blocks], [0], hashes, timeout_s)))
        destination = PeerRef("d", "dst-1", "", [self.address])
        self.sender.apply(GrantOrder(Grant(key, destination, self.kv, [0], [pack_ids(dst_blocks)])))

    def final(self, key: AttemptKey, num_blocks: int) -> None:
        """Report every layer as final, like the engine."""
        for layer in range(self.kv.spec.num_layers):
            self.sender.blocks_final(key, layer, num_blocks)

    def finish(self) -> None:
        """Wait for success at both ends. Raises: RuntimeError, TransferError."""
        for wanted in (Received.__name__, DestinationReleased.__name__):
            kind, error = self.ask("next event")
            if kind != wanted:
                raise RuntimeError(f"{kind} instead of {wanted}: {error}")
        released = self.released()
        if released.error is not None:
            raise released.error

    def released(self) -> SourceReleased:
        """Wait for the sender's next event."""
        return self.events.get(timeout=DEADLINE_S)

    def close(self) -> None:
        """Stop both."""
        self.sender.close()
        with contextlib.suppress(BrokenPipeError):  # a test may have killed it
            self.pipe.send(None)
        self.child.join(DEADLINE_S)
        self.child.kill()
        self.child.join(DEADLINE_S)
        self.pipe.close()

    def _hear(self) -> Any:
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError("the receiving process says nothing")
        return self.pipe.recv()


def relay_bytes_per_s(
    kv: KVLayout, tokens: int, transfers: int, transport: str = "auto", device: str = "cuda:0"
) -> float:
    """KV bytes per second of the median of `transfers`, final all at once, until the sender has its blocks back."""
    count = tokens // kv.spec.block_size
    pair = GpuPair(kv, count, transport, (device, device))
    try:
        took: list[float] = []
        for number in range(transfers + 2):
            key = AttemptKey(f"r{number}", 1)
            pair.open(key, torch.randperm(count).tolist(), torch.randperm(count).tolist())
            started = time.perf_counter()
            pair.final(key, count)
            released = pair.released()
            took.append(time.perf_counter() - started)
            if released.error is not None:
                raise released.error
            for _ in (Received, DestinationReleased):
                pair.ask("next event")
        return count * kv.spec.bytes_per_block / sorted(took[2:])[transfers // 2]
    finally:
        pair.close()

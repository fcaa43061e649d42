"""Ranks that relay KV over one of the project's transports, and nothing else: worker classes, one process per rank."""

from __future__ import annotations

import random
import threading
import time
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from support.single_transport import (
    cuda_ipc_receiver,
    cuda_ipc_sender,
    gloo_receiver,
    gloo_sender,
    shm_receiver,
    shm_sender,
    zmq_receiver,
    zmq_sender,
)

from common.base.hashing import BLOCK_SIZE, hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
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
from common.kv.rank_layout import KVLayout, blocks_for
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage

_TIMEOUT_S = 60.0
_COPIES = 4
_SOURCE, _DESTINATION = "0" * 16, "1" * 16
"""Incarnations."""

SENDERS = {
    "zmq": zmq_sender,
    "zmq_sealed": zmq_sender,
    "collective": gloo_sender,
    "shm": shm_sender,
    "cuda_ipc": cuda_ipc_sender,
}
RECEIVERS = {
    "zmq": zmq_receiver,
    "zmq_sealed": partial(zmq_receiver, seals=True),
    "collective": gloo_receiver,
    "shm": shm_receiver,
    "cuda_ipc": cuda_ipc_receiver,
}
"""Functions of (storage, layout, rank, on_event) and, on a GPU, of the device that copies."""


class _End:
    """What both ends have: one rank's storage of the model's KV, and the blocks of each transfer."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        transfers: int,
        shuffled: bool,
        seed: int,
        layout: tuple[int, int] = (1, 1),
        rank: int = 0,
        device: str = "cpu",
    ) -> None:
        """`layout`: tp and pp of this end's node; `rank`: which of its ranks this is."""
        self._model = (layers, kv_heads, head_dim)
        self.layout = self.layout_of(layout)
        self.rank = rank
        self.shard = self.layout.shards()[rank]
        each = blocks_for(tokens)
        self.storage = KVStorage(self.layout, self.shard, each * transfers, device)
        self.storage.groups[0].stacked.zero_()  # its pages are there before anything is measured
        self.bits = self.storage.groups[0].stacked.view(torch.int16)
        self.tokens = tokens
        blocks = list(range(each * transfers))
        if shuffled:
            random.Random(seed).shuffle(blocks)
        self.blocks = [blocks[i * each : (i + 1) * each] for i in range(transfers)]
        root = root_hash("bench")
        self.hashes = [hash_blocks(root, [i + 1] * (each * BLOCK_SIZE), include_partial=True) for i in range(transfers)]
        self.done = threading.Condition()
        self.left: set[AttemptKey] = set()
        self.errors: list[str] = []

    def layout_of(self, tp_pp: tuple[int, int]) -> KVLayout:
        """The model's KV on so many ranks."""
        layers, kv_heads, head_dim = self._model
        tp, pp = tp_pp
        stages = tuple((stage + 1) * layers // pp - stage * layers // pp for stage in range(pp))
        return KVLayout("bench", KVSpec.uniform(layers, kv_heads, head_dim, "bfloat16"), tp_size=tp, pp_layers=stages)

    def keys(self, number: int) -> list[AttemptKey]:
        """Of that round's transfers."""
        return [AttemptKey(f"bench-{i}", number) for i in range(len(self.blocks))]

    @cached_property
    def truth(self) -> torch.Tensor:
        """This rank's share of what every rank of every layout must hold, blocks in the order of the sequences."""
        layers, kv_heads, head_dim = self._model
        shape = (layers, 2, self.bits.size(2), kv_heads, BLOCK_SIZE, head_dim)
        whole = np.random.default_rng(1).integers(-(2**15), 2**15, size=shape, dtype=np.int16)
        shard = self.shard
        own = whole[shard.layer_lo : shard.layer_hi, :, :, shard.parts[0].head_lo : shard.parts[0].head_hi]
        return torch.from_numpy(own).to(self.bits.device)

    def more(self) -> dict[str, Any]:
        """What a transport on a GPU takes beside the others."""
        if self.bits.device.type == "cpu":
            return {}
        from kvtransfer.copy.cuda import CudaDevice

        return {"device": CudaDevice(self.storage)}

    def order(self) -> list[int]:
        """All blocks in the order of the sequences."""
        return [block for blocks in self.blocks for block in blocks]

    def ended(self, key: AttemptKey, error: Exception | None) -> None:
        """One transfer is over at this end; on the transport's thread."""
        with self.done:
            self.left.discard(key)
            if error is not None:
                self.errors.append(str(error))
            self.done.notify_all()

    def wait(self) -> None:
        """Until all of this round's transfers are over here. Raises: RuntimeError."""
        with self.done:
            if not self.done.wait_for(lambda: not self.left or self.errors, _TIMEOUT_S):
                raise RuntimeError(f"{len(self.left)} transfers did not end within {_TIMEOUT_S:.0f} s")
        if self.errors:
            raise RuntimeError(self.errors[0])

    def cpu_s(self) -> float:
        """Processor time of this process so far."""
        return time.process_time()

    def copy_rate(self, size_bytes: int) -> float:
        """Bytes/s that this process copies from one array to another, on average over a few times."""
        source = np.ones(size_bytes, dtype=np.uint8)
        target = np.ones_like(source)
        started = time.perf_counter()
        for _ in range(_COPIES):
            target[:] = source
        return _COPIES * size_bytes / (time.perf_counter() - started)


class RelaySource(_End):
    """A rank of the prefill side: every block final from the start, all transfers granted at once."""

    def __init__(self, transport: str = "zmq", **sizes: Any) -> None:
        super().__init__(**sizes, seed=1)
        self.bits[:, :, self.order()] = self.truth
        if self.bits.is_cuda:
            torch.cuda.synchronize()
        self.sender: Any = None
        self.use(transport)

    def use(self, transport: str) -> None:
        """Send over `transport` from now on."""
        self.close()
        make: Any = SENDERS[transport]
        self.sender = make(self.storage, self.layout, self.rank, self._on_event, incarnation=_SOURCE, **self.more())

    def _on_event(self, event: TransferEvent) -> None:
        if isinstance(event, SourceReleased):
            self.ended(event.key, event.error)

    def prepare(self, number: int) -> None:
        """Open all transfers of round `number`; all of their KV is there."""
        keys = self.keys(number)
        self.left = set(keys)
        for key, blocks, hashes in zip(keys, self.blocks, self.hashes, strict=True):
            plan = TransferPlan(key, [blocks], [0], hashes, _TIMEOUT_S)
            self.sender.apply(OpenSourceOrder(plan, final_blocks=len(blocks)))

    def send(self, number: int, addresses: list[str], layout: tuple[int, int] = (1, 1)) -> float:
        """Send everything to the ranks at `addresses`. Returns when the grants were given (`time.perf_counter`)."""
        dst = PeerRef("dst", _DESTINATION, "none", addresses)
        dst_layout = self.layout_of(layout)
        started = time.perf_counter()
        for key, blocks in zip(self.keys(number), self.blocks, strict=True):
            self.sender.apply(GrantOrder(Grant(key, dst, dst_layout, [0], [pack_ids(blocks)])))
        self.wait()
        return started

    def close(self) -> None:
        """Stop the transport."""
        if self.sender is not None:
            self.sender.close()


class RelayDestination(_End):
    """A rank of the decode side: opens all transfers, then waits until every slice is in and verified."""

    def __init__(self, transport: str = "zmq", **sizes: Any) -> None:
        super().__init__(**sizes, seed=2)
        self.received = 0
        self.receiver: Any = None
        self.use(transport)

    def use(self, transport: str) -> None:
        """Receive over `transport` from now on."""
        self.close()
        make: Any = RECEIVERS[transport]
        self.receiver = make(
            self.storage, self.layout, self.rank, self._on_event, incarnation=_DESTINATION, **self.more()
        )

    def _on_event(self, event: TransferEvent) -> None:
        if isinstance(event, ReceiveFailed):
            self.ended(event.key, event.error)
        elif isinstance(event, Received):
            self.received += event.bytes_received
            self.ended(event.key, None)

    def address(self) -> str:
        """Where to send."""
        return self.receiver.address

    def expect(self, number: int, layout: tuple[int, int] = (1, 1)) -> None:
        """Open all transfers of round `number`, from a node of that layout."""
        self.received = 0
        keys = self.keys(number)
        self.left = set(keys)
        src, src_layout = PeerRef("src", _SOURCE, "none", []), self.layout_of(layout)
        for key, blocks, hashes in zip(keys, self.blocks, self.hashes, strict=True):
            plan = TransferPlan(key, [blocks], [0], hashes, _TIMEOUT_S)
            self.receiver.apply(OpenDestinationOrder(plan, src, src_layout))

    def arrived(self) -> tuple[float, int]:
        """Wait for everything. Returns when the last slice was in (`time.perf_counter`), and the bytes."""
        self.wait()
        return time.perf_counter(), self.received

    def intact(self) -> bool:
        """Whether all KV is as the sources had it. Forgets it, so that the next relay has to bring it again."""
        same = torch.equal(self.bits[:, :, self.order()], self.truth)
        self.bits.zero_()
        return same

    def close(self) -> None:
        """Stop the transport."""
        if self.receiver is not None:
            self.receiver.close()

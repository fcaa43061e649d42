"""A model that nodes registered: the facts in their records, and its files as loaded by this router.

Runs on the router's event loop; files are loaded on a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from common.base.errors import ConfigError
from common.control.messages import Adapter, ModelInfo, NodeRecord, Role, Task
from common.kv.rank_layout import KVLayout, first_difference
from common.model.fingerprint import without_arithmetic
from router.models import served_model
from router.models.preloads import Preloads
from router.models.served_model import LoadOptions, ServedModel

log = logging.getLogger(__name__)

RETRY_S, _MAX_RETRY_S = 2.0, 60.0
"""Pause before files that could not be used are tried again; it doubles each time."""


class RegisteredModel:
    """All nodes that registered a model under one name. `on_loaded()` is called when `served` was loaded."""

    def __init__(
        self,
        name: str,
        options: LoadOptions,
        preloads: Preloads,
        on_loaded: Callable[[], None],
        *,
        allow_mixed_weights: bool = False,
    ) -> None:
        self.name = name
        self.records: list[NodeRecord] = []
        """The nodes that serve it now."""
        self.adapters: list[Adapter] = []
        """LoRA adapters of this model, one for each name. While the model has no node, they are those of its last nodes."""
        self.adapter_paths: dict[str, str] = {}
        """Where a node has read each from, by name."""
        self.roles: set[Role] = set()
        """The roles of all nodes that it has had; with a generating model also decode."""
        self.served: ServedModel | None = None
        self.problem = "its files are being loaded"
        """Why `served` is None."""
        self.is_refused = False
        """Whether its files were found unusable; `problem` says why."""
        self._options = options
        self._preloads = preloads
        self._on_loaded = on_loaded
        self._given: ServedModel | None = None
        self._files: ServedModel | None = None
        """The model as loaded from the nodes' path."""
        self._loading: asyncio.Task[None] | None = None
        self._wanted: ModelInfo | None = None
        """The facts in the nodes' latest records."""
        self._updated = asyncio.Event()
        """Set when there are other records than those of the last attempt to load."""
        self.ignored: dict[str, str] = {}
        """Why nodes that registered this name are not used, by incarnation."""
        self._allow_mixed_weights = allow_mixed_weights
        self._weights: KVLayout | None = None
        """What the nodes in use compute with (`_weights_of`)."""
        self._told: set[tuple[str, str]] = set()
        """(incarnation, reason) pairs that were logged, of nodes that are registered: each is logged once."""

    @property
    def task(self) -> Task:
        """The task of its nodes."""
        return self.records[0].model.task if self.records else "generate" if self.served is None else self.served.task

    def use(self, options: LoadOptions, given: ServedModel | None) -> None:
        """Load its files with these options from now on; or use those of `given`, which the configuration names."""
        if (options, given) != (self._options, self._given):
            self.close()
            self._options, self._given = options, given
            self._files = self.served = self._loading = None

    def update(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """Take the nodes that registered this name now, the oldest first. Returns those that can be used."""
        self.ignored.clear()
        here = {record.peer.incarnation for record in records}
        self._told = {(incarnation, message) for incarnation, message in self._told if incarnation in here}
        self.roles.update(record.role for record in records)
        if any(record.model.task == "generate" for record in records):
            self.roles.add("decode")
        self.records = self._with_our_weights(self._with_our_tokenizer(self._with_one_task(records)))
        if self.records:
            self._learn(_decoding(self.records))
            self.adapters = _adapters(self.records)
            self.adapter_paths = {name: path for record in self.records for name, path in record.adapter_paths.items()}
        elif self.is_refused:
            self.close()
        return self.records

    def close(self) -> None:
        """Stop loading."""
        if self._loading is not None:
            self._loading.cancel()

    def _with_one_task(self, records: list[NodeRecord]) -> list[NodeRecord]:
        same = [record for record in records if record.model.task == records[0].model.task]
        for record in records:
            if record not in same:
                task, ours = record.model.task, records[0].model.task
                self._ignore(record, f"its model {self.name} is for {task!r}, that of an older node for {ours!r}")
        return same

    def _with_our_tokenizer(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """The nodes with the same tokenizer as this router.

        If there is none and the configuration does not name the model, those with the tokenizer of the oldest one that
        decodes: the router then loads that.
        """
        ours = self._given or self._files
        same = [] if ours is None else _with_tokenizer(records, ours.tokenizer_digest)
        whose = "this router's"
        if not same and self._given is None and records:
            oldest = next((record for record in records if record.role == "decode"), records[0])
            same = _with_tokenizer(records, oldest.model.tokenizer) if oldest.model.tokenizer else records
            whose = f"that of {oldest.peer.node_id}"
        for record in records:
            if record not in same:
                self._ignore(record, f"its tokenizer.json for {self.name} differs from {whose}")
        return same

    def _with_our_weights(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """The nodes with the weights, dtype, quantization and KV type of those in use.

        Once none of these decodes, those of the oldest node that decodes are used.
        """
        decoding = [_weights_of(record) for record in _decoding(records)]
        if decoding and self._weights not in decoding:
            self._weights = decoding[0]
        if self._weights is None:
            return records
        found = [(record, first_difference(_weights_of(record), self._weights)) for record in records]
        same = [record for record, difference in found if difference is None]
        for record, difference in found:
            if difference is not None:
                what, theirs, ours = difference
                what = what if what == "fingerprint" else f"KV's {what}"
                why = f"it would answer otherwise than {_decoding(same)[0].peer.node_id}: its {what} is {theirs!r}, not {ours!r}"
                if self._allow_mixed_weights:
                    self._tell(record, f"{record.peer.node_id} is used because of --allow-mixed-weights: {why}")
                else:
                    self._ignore(record, f"{why}; the router's --allow-mixed-weights would use both")
        return records if self._allow_mixed_weights else same

    def _ignore(self, record: NodeRecord, why: str) -> None:
        message = self.ignored[record.peer.incarnation] = f"{record.peer.node_id} is ignored: {why}"
        self._tell(record, message, logging.ERROR)

    def _tell(self, record: NodeRecord, message: str, level: int = logging.WARNING) -> None:
        """Log a message about a node once."""
        told = record.peer.incarnation, message
        if told not in self._told:
            self._told.add(told)
            log.log(level, "%s", message)

    def _learn(self, decoding: list[NodeRecord]) -> None:
        """Take the facts of these nodes. Their longest context is the model's, because requests go where they fit."""
        largest = max(decoding, key=lambda record: record.model.max_model_len)
        context = largest.model.max_model_len
        for record in decoding:
            if (shorter := record.model.max_model_len) < context:
                what = (
                    f"{record.peer.node_id} takes {shorter} tokens of the {context} that {largest.peer.node_id} takes"
                )
                self._tell(record, f"{what}: longer requests for {self.name} go to larger nodes only")
        info = replace(decoding[0].model, max_model_len=context)
        files = self._given or self._files
        if files is not None and (self._given is not None or self._is_of(files, info)):
            self._serve(files, info)
            return
        self._wanted = info
        self._updated.set()
        if self._loading is None or self._loading.done():
            self._loading = asyncio.get_running_loop().create_task(self._load())

    def _is_of(self, files: ServedModel, info: ModelInfo) -> bool:
        return files.path == info.path and info.tokenizer in (files.tokenizer_digest, "")

    async def _load(self) -> None:
        """Load its files, on one thread at a time. Those that cannot be used are tried again: a folder may not be mounted yet."""
        wait_s = RETRY_S
        while self._wanted is not None:
            self._updated.clear()
            if await self._try_to_load(self._wanted):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._updated.wait()
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    async def _try_to_load(self, info: ModelInfo) -> bool:
        try:
            if info.task == "generate":
                options = self._options
                model = await self._preloads.take(info, options) or await asyncio.to_thread(
                    served_model.load, info.path, info.name, options
                )
            else:
                model = await asyncio.to_thread(served_model.load_pooling, info, self._options)
        except ConfigError as error:
            return self._refuse(f"{error}; give the router a folder with --model")
        except Exception as error:  # a model folder can hold anything; clients must be told that it cannot be loaded
            return self._refuse(f"{info.path} cannot be loaded: {type(error).__name__}; see the router's log", error)
        latest = self._wanted or info  # nodes may have come and gone meanwhile
        if (latest.path, latest.tokenizer, latest.task) != (info.path, info.tokenizer, info.task):
            return False  # their files are loaded at once
        if info.tokenizer not in (model.tokenizer_digest, ""):
            return self._refuse(f"tokenizer.json in {info.path} on this machine differs from that of the nodes")
        self.is_refused = False
        self._files = model
        self._serve(model, latest)
        log.info("serving %s from %s", info.name, info.path)
        self._on_loaded()
        return True

    def _refuse(self, problem: str, error: Exception | None = None) -> bool:
        if (True, problem) != (self.is_refused, self.problem):  # once, however often it is tried
            log.error("cannot use the model that the nodes registered: %s", problem, exc_info=error)
        self.is_refused, self.problem = True, problem
        return False

    def _serve(self, files: ServedModel, info: ModelInfo) -> None:
        self.served = replace(
            files,
            name=info.name,
            root=info.name,
            base=info.name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            task=info.task,
            hidden_size=info.hidden_size,
        )


def _decoding(records: list[NodeRecord]) -> list[NodeRecord]:
    """The nodes that decode, else (of a pooling model, or without decode nodes) all."""
    return [record for record in records if record.role == "decode"] or records


def _weights_of(record: NodeRecord) -> KVLayout:
    """What decides the answers of a node, without what decides only their last bits and without its split over ranks."""
    return KVLayout(without_arithmetic(record.layout.fingerprint), record.layout.spec)


def _with_tokenizer(records: list[NodeRecord], digest: str) -> list[NodeRecord]:
    """The nodes with this tokenizer, and those that do not tell."""
    return [record for record in records if record.model.tokenizer in (digest, "")]


def _adapters(records: list[NodeRecord]) -> list[Adapter]:
    """The adapters of these nodes. Of different weights under one name, those that most decode nodes have, then most nodes."""
    counts: Counter[Adapter] = Counter()
    for record in records:
        counts.update(dict.fromkeys(record.adapters, len(records) + 1 if record.role == "decode" else 1))
    best = {adapter.name: adapter for adapter, _ in reversed(counts.most_common())}
    return sorted(best.values())

"""Admin routes for the adapters of a running node: `POST /lora/load`, `POST /lora/unload`, `GET /lora`. On the asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from common.base.clock import monotonic
from common.base.errors import BadRequest, ConfigError, Forbidden, KvRelayError
from common.cluster.records import LoadedAdapters
from common.control.admin_server import AdminRoute, Call
from common.control.messages import Adapter
from common.model.generic.config import GenericConfig
from common.model.lora.checkpoint import open_adapter
from common.node.adapter_table import AdapterSource, AdapterTable
from common.node.plan import NodePlan
from common.node.server import NodeServer

log = logging.getLogger(__name__)

_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[^\W_][\w.:@+-]*(?:/[^\W_][\w.:@+-]*)*")


def open_source(name: str, path: str, plan: NodePlan, *, below: str = "", owner: str | None = None) -> AdapterSource:
    """Check an adapter and compute its digest, which reads all of its weights. `below`: the folder that must contain the
    adapter's, and that a relative `path` starts at.

    Raises: ConfigError.
    """
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS:
        raise ConfigError(
            f"{name[:100]!r} cannot be an adapter's name: it must have up to {_MAX_NAME_CHARS} letters, digits and . _ : @ + -, "
            "in parts that begin with a letter or digit and are separated by /"
        )
    if name in plan.names:
        raise ConfigError(f"{name!r} is the name of the model: give the LoRA adapter another one")
    config = plan.model_config
    if isinstance(config, GenericConfig):
        raise ConfigError(
            f"LoRA adapters need a native family, but transformers computes the layers of {config.architecture}"
        )
    try:
        folder = _folder_below(path, below) if below else Path(path).expanduser().absolute()
    except (RuntimeError, ValueError, OSError) as error:  # the home of an unknown user, a zero byte, a circle of links
        raise ConfigError(f"{path[:200]!r} is not a folder: {error}") from error
    checkpoint = open_adapter(folder, config, plan.config.max_lora_rank)
    return AdapterSource(Adapter(name, checkpoint.digest(checkpoint.read())), str(folder), owner)


def _folder_below(path: str, below: str) -> Path:
    """The folder that `path` names, with all links followed. Raises: ConfigError, which says nothing about other folders, unless
    it is in the folder `below`.
    """
    top = Path(below).resolve()
    folder = (top / path).resolve()
    if not folder.is_relative_to(top):
        raise ConfigError("lora_path must name a folder below the router's --lora-dir")
    return folder


def configured_sources(plan: NodePlan) -> list[AdapterSource]:
    """The adapters of `--lora`. Raises: ConfigError."""
    return [open_source(name, path, plan) for name, path in plan.lora_folders.items()]


async def loaded_sources(
    loaded: LoadedAdapters | None, configured: Sequence[AdapterSource], plan: NodePlan
) -> tuple[list[AdapterSource], list[AdapterSource] | None]:
    """Open the adapters that an operator had loaded into the last process of this node. Returns the usable and the unusable
    ones; a name that is `configured` now makes an adapter unusable. The unusable ones are logged; None if `loaded` is None."""
    if loaded is None:
        return [], None
    taken = {source.adapter.name for source in configured}
    usable: list[AdapterSource] = []
    missing: list[AdapterSource] = []
    for adapter, path, owner in zip(loaded.adapters, loaded.paths, loaded.owners, strict=True):
        try:
            if adapter.name in taken:
                raise ConfigError("another adapter has its name")
            source = await asyncio.to_thread(open_source, adapter.name, path, plan, owner=owner)
            if source.adapter != adapter:
                raise ConfigError("its files have changed")
        except ConfigError as error:
            log.error("LoRA adapter %r, loaded before this start, cannot be used: %s", adapter.name, error.message)
            missing.append(AdapterSource(adapter, path, owner))
        else:
            taken.add(adapter.name)
            usable.append(source)
    return usable, missing


class AdapterAdmin:
    """Serves the routes for adapters, and begins to load adapters at the start. `table` belongs to the engine's thread."""

    def __init__(
        self,
        table: AdapterTable,
        configured: Sequence[AdapterSource],
        missing: Sequence[AdapterSource] | None,
        plan: NodePlan,
        node: NodeServer,
    ) -> None:
        """configured: the adapters of `--lora`. missing: the unusable ones that `loaded_sources` returned. node: the server of
        the present role."""
        self.node = node
        self._table = table
        self._configured = configured
        self._missing = None if missing is None else {source.adapter.name: source for source in missing}
        self._plan = plan
        self._began = False

    @property
    def loaded(self) -> LoadedAdapters | None:
        """The adapters that were loaded while the node, or its last process, ran, usable or not; None if unknown."""
        if self._missing is None:
            return None
        sources = [source for source in self._table.sources if source not in self._configured]
        sources += [each for name, each in self._missing.items() if name not in {one.adapter.name for one in sources}]
        return LoadedAdapters(
            self.node.node_id,
            [each.adapter for each in sources],
            [each.path for each in sources],
            [each.owner for each in sources],
        )

    def _changed(self, name: str) -> None:
        """Register at once that an adapter of this name was loaded or unloaded."""
        self._missing = {other: each for other, each in (self._missing or {}).items() if other != name}
        self.node.adapters_changed(self._table.sources, self.loaded)

    def load_first(self) -> None:
        """Begin to load the first `max_loras` of the registered adapters. Later calls do nothing."""
        if self._began:
            return
        self._began = True

        def load() -> None:
            for adapter in self._table.adapters[: self._plan.config.max_loras]:
                self._table.take(adapter, monotonic(), _report_failure)

        self.node.ask(load)

    def routes(self) -> list[AdminRoute]:
        """The routes, for the admin port."""
        return [
            AdminRoute("GET", "/lora", self._list),
            AdminRoute("POST", "/lora/load", self._load),
            AdminRoute("POST", "/lora/unload", self._unload),
        ]

    async def _list(self, call: Call) -> dict[str, Any]:
        return {"adapters": await asyncio.wrap_future(self.node.ask(self._table.describe))}

    async def _load(self, call: Call) -> dict[str, Any]:
        """Load an adapter, and answer when all ranks have it. Raises: BadRequest if it cannot be used, AdapterMissing if there
        is no room for it in time."""
        name, path = _text(call, "name"), _text(call, "path")
        below = _text(call, "below") if "below" in call.body else ""
        try:
            source = await asyncio.to_thread(open_source, name, path, self._plan, below=below, owner=_owner(call))
        except ConfigError as error:
            raise BadRequest(error.message) from error
        done: Future[int] = Future()
        await asyncio.wrap_future(self.node.ask(lambda: self._begin_load(source, done)))
        try:
            await asyncio.wrap_future(done)
        except KvRelayError as error:
            self._changed(name)
            raise BadRequest(error.message) if isinstance(error, ConfigError) else error from error
        self._changed(name)
        log.info("LoRA adapter %r was loaded from %s", name, source.path)
        return {"name": name, "digest": source.adapter.digest}

    def _begin_load(self, source: AdapterSource, done: Future[int]) -> None:
        """Begin to load an adapter. If that fails, requests cannot name it, unless they could before."""
        was_served = source.adapter in self._table.adapters
        self._table.register(source)

        def on_loaded(result: int | KvRelayError) -> None:
            if isinstance(result, KvRelayError) and not was_served and source.adapter in self._table.adapters:
                self._table.unregister(source.adapter.name)
            if not done.set_running_or_notify_cancel():  # the caller has stopped waiting
                return
            if isinstance(result, KvRelayError):
                done.set_exception(result)
            else:
                done.set_result(result)

        adapter_id = self._table.take(source.adapter, monotonic(), on_loaded)
        if adapter_id is not None:
            on_loaded(adapter_id)

    async def _unload(self, call: Call) -> dict[str, Any]:
        name, owner = _text(call, "name"), _owner(call)
        is_served = any(each.name == name for each in self._table.adapters)
        known = [each for each in (*self._table.sources, *(self._missing or {}).values()) if each.adapter.name == name]
        if owner is not None and known and owner != known[0].owner:
            raise Forbidden(f"LoRA adapter {name!r} was loaded by an operator or another client, who may unload it")
        if not is_served and self._missing and name in self._missing:
            adapter = self._missing[name].adapter
        else:
            adapter = await asyncio.wrap_future(self.node.ask(lambda: self._table.unregister(name)))
        self._changed(name)
        log.info("LoRA adapter %r was unloaded", name)
        return {"name": name, "digest": adapter.digest}


def _report_failure(result: int | KvRelayError) -> None:
    if isinstance(result, KvRelayError):
        log.error("a LoRA adapter cannot be loaded: %s", result.message)


def _owner(call: Call) -> str | None:
    """The client on whose behalf a router asks; None: an operator asks. Raises: BadRequest."""
    owner = call.body.get("owner")
    if owner is not None and not isinstance(owner, str):
        raise BadRequest("owner must be a text", param="owner")
    return owner


def _text(call: Call, field: str) -> str:
    """Read a text from the body. Raises: BadRequest."""
    value = call.body.get(field)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{field} must be a non-empty text", param=field)
    return value

"""The LoRA adapters that a node serves: which exist, which are in the ranks' memory, which requests wait. Engine thread.

At most `max_loras` adapters are in memory. A request whose adapter is not in memory waits, beside the batch, until it is
loaded. If there is no free slot, the least recently used adapter is marked for eviction: it takes no new requests, and is
evicted when its last request has ended, if one still waits for the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from common.base.errors import AdapterMissing, BadRequest, KvRelayError, NotFound
from common.control.messages import Adapter

LOAD_TIMEOUT_S = 60.0
"""How long a request waits for its adapter."""

OnLoaded = Callable[[int | KvRelayError], None]
"""Called once, with the id by which steps name the adapter, or with the error why it cannot be used."""
IsWanted = Callable[[], bool]


class AdapterSource(NamedTuple):
    """An adapter and the folder of its files."""

    adapter: Adapter
    path: str
    owner: str | None = None
    """The client that loaded it through a router and may unload it; None: an operator."""


@dataclass(frozen=True)
class AdapterLoaded:
    """Event of the engine loop: all ranks have the adapter in memory, or could not load it."""

    adapter_id: int
    error: KvRelayError | None = None


class AdapterLoader(Protocol):
    """Loads and frees adapters on all ranks of the node."""

    def load(self, adapter_id: int, source: AdapterSource) -> None:
        """Make every rank load an adapter; `AdapterLoaded` follows."""
        ...

    def drop(self, adapter_id: int) -> None:
        """Make every rank free an adapter after the steps that have already started."""
        ...


class NoAdapters:
    """The `AdapterLoader` of a node without adapters."""

    def load(self, adapter_id: int, source: AdapterSource) -> None:
        raise AssertionError(f"{source.adapter.name} was registered at a node without adapters")

    def drop(self, adapter_id: int) -> None:
        pass


@dataclass(eq=False)
class _Copy:
    """An adapter that is in the ranks' memory, or that they are loading."""

    adapter_id: int
    used: int
    """When a request last took it; larger is later."""
    is_loaded: bool = False
    is_evicting: bool = False
    """Whether it is marked for eviction: it takes no new requests, and is evicted when its last request has ended."""

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests."""
        return self.is_loaded and not self.is_evicting


class _Waiting(NamedTuple):
    """A request that waits for an adapter."""

    due_s: float
    on_loaded: OnLoaded
    is_wanted: IsWanted


@dataclass(eq=False)
class _Wanted:
    """An adapter that takes no requests yet, and the requests that wait for it."""

    source: AdapterSource
    waiting: list[_Waiting] = field(default_factory=list[_Waiting])


class AdapterTable:
    """All adapters of one node. Invariant: at most `max_loras` are in memory, including those that are being loaded."""

    def __init__(
        self, loader: AdapterLoader | None = None, max_loras: int = 1, sources: Sequence[AdapterSource] = ()
    ) -> None:
        """`sources`: the adapters that are served from the beginning."""
        self._loader = loader or NoAdapters()
        self._max_loras = max_loras
        self._sources: dict[str, AdapterSource] = {}
        """Adapters that requests can name, by name."""
        self._copies: dict[Adapter, _Copy] = {}
        self._wanted: dict[Adapter, _Wanted] = {}
        """Adapters that requests wait for, in the order of arrival."""
        self._last_id = 0
        self._clock = 0
        self.sources: tuple[AdapterSource, ...] = ()
        """The adapters that requests can name. The tuple is replaced as a whole, so that any thread may read it."""
        for source in sources:
            self.register(source)

    # ------------------------------------------------------------ operators

    def register(self, source: AdapterSource) -> None:
        """Serve an adapter, which is loaded when it is needed. Nothing changes if it is already served.

        Raises: BadRequest if other weights are served under its name.
        """
        name = source.adapter.name
        present = self._sources.get(name)
        if present is not None and present.adapter != source.adapter:
            raise BadRequest(f"an adapter named {name!r} with other weights is loaded: unload it first")
        self._sources.setdefault(name, source)
        self._changed()

    def unregister(self, name: str) -> Adapter:
        """Stop serving an adapter; requests that have begun finish with it. Raises: NotFound."""
        source = self._sources.pop(name, None)
        if source is None:
            raise NotFound(f"no adapter is named {name!r}")
        self._changed()
        if (copy := self._copies.get(source.adapter)) is not None:
            copy.is_evicting = True
        self._tell(source.adapter, AdapterMissing(f"LoRA adapter {name!r} was unloaded"))
        return source.adapter

    def describe(self) -> list[dict[str, Any]]:
        """Describe for operators every adapter that requests can name."""
        loaded = {adapter for adapter, copy in self._copies.items() if copy.is_loaded}
        return [
            {"name": adapter.name, "digest": adapter.digest, "path": path, "in_memory": adapter in loaded}
            for adapter, path, _ in self._sources.values()
        ]

    def _changed(self) -> None:
        self.sources = tuple(self._sources.values())

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests can name. For any thread."""
        return tuple(source.adapter for source in self.sources)

    # ------------------------------------------------------------ requests

    def check(self, adapter: Adapter) -> None:
        """Check that requests can name the adapter. Raises: AdapterMissing."""
        source = self._sources.get(adapter.name)
        if source is None:
            raise AdapterMissing(f"this node does not have LoRA adapter {adapter.name!r}")
        if source.adapter != adapter:
            raise AdapterMissing(f"LoRA adapter {adapter.name!r} has other weights at this node")

    def take(
        self, adapter: Adapter, now_s: float, on_loaded: OnLoaded, is_wanted: IsWanted = lambda: True
    ) -> int | None:
        """Return the id of an adapter that `check` accepted, or None if it is not in memory. In that case `on_loaded` gets the id
        later, or an error if that fails, takes too long or is no longer `is_wanted`."""
        copy = self._copies.get(adapter)
        if copy is not None and copy.is_usable:
            self._clock += 1
            copy.used = self._clock
            return copy.adapter_id
        wanted = self._wanted.setdefault(adapter, _Wanted(self._sources[adapter.name]))
        wanted.waiting.append(_Waiting(now_s + LOAD_TIMEOUT_S, on_loaded, is_wanted))
        self._load_wanted()
        return None

    def makes_room(self, adapter: Adapter | None) -> bool:
        """Whether an adapter is marked for eviction in favour of another one, and can be loaded again."""
        copy = None if adapter is None else self._copies.get(adapter)
        return copy is not None and copy.is_evicting and adapter in self.adapters

    def loaded(self, event: AdapterLoaded) -> None:
        """Handle the answer of all ranks to `AdapterLoader.load`."""
        adapter, copy = next(item for item in self._copies.items() if item[1].adapter_id == event.adapter_id)
        copy.is_loaded = event.error is None
        if event.error is not None:
            del self._copies[adapter]
            self._loader.drop(copy.adapter_id)  # some ranks may have it
        elif copy.is_evicting:
            return  # it was unloaded while it was being loaded
        self._clock += 1
        copy.used = self._clock
        self._tell(adapter, event.error or copy.adapter_id)

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do."""
        return not self._wanted and not any(copy.is_evicting for copy in self._copies.values())

    def settle(self, in_use: set[int], now_s: float) -> None:
        """Free adapters that are marked for eviction and not `in_use` (ids), load wanted ones, and end waits that are over."""
        for adapter, copy in list(self._copies.items()):
            if copy.is_evicting and copy.is_loaded and copy.adapter_id not in in_use:
                del self._copies[adapter]
                self._loader.drop(copy.adapter_id)
        for adapter, wanted in list(self._wanted.items()):
            remaining = [each for each in wanted.waiting if now_s <= each.due_s and each.is_wanted()]
            over = [each for each in wanted.waiting if each not in remaining]
            wanted.waiting = remaining
            if not remaining:
                del self._wanted[adapter]
            for each in over:
                name = adapter.name
                each.on_loaded(AdapterMissing(f"LoRA adapter {name!r} was not loaded within {LOAD_TIMEOUT_S:g} s"))
        self._load_wanted()
        for adapter in list(self._wanted):
            if (copy := self._copies.get(adapter)) is not None and copy.is_usable:
                self._tell(adapter, copy.adapter_id)

    def _tell(self, adapter: Adapter, result: int | KvRelayError) -> None:
        """End all waits for an adapter with `result`."""
        wanted = self._wanted.pop(adapter, None)
        for each in wanted.waiting if wanted else ():
            each.on_loaded(result)

    def _load_wanted(self) -> None:
        """Load wanted adapters while there are free slots; for the rest, mark others for eviction."""
        missing = [wanted for adapter, wanted in self._wanted.items() if adapter not in self._copies]
        for wanted in missing[: max(0, self._max_loras - len(self._copies))]:
            self._last_id += 1
            self._clock += 1
            self._copies[wanted.source.adapter] = _Copy(self._last_id, self._clock)
            self._loader.load(self._last_id, wanted.source)
        missing_slots = sum(adapter not in self._copies for adapter in self._wanted)
        for adapter, copy in self._copies.items():
            source = self._sources.get(adapter.name)
            copy.is_evicting = source is None or source.adapter != adapter
            missing_slots -= copy.is_evicting
        remaining = sorted((copy for copy in self._copies.values() if copy.is_usable), key=lambda copy: copy.used)
        for copy in remaining[: max(0, missing_slots)]:
            copy.is_evicting = True

"""The models that this router serves: the one that its configuration names, and all that nodes register.

Runs on the router's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from common.base.errors import BadRequest, NotFound, Unavailable
from common.config.fields import listed
from common.config.service_configs import RouterConfig
from common.control.messages import NodeRecord, Role, Task
from router.models import served_model
from router.models.preloads import Preloads
from router.models.registered_model import RegisteredModel
from router.models.served_model import LoadOptions, ServedModel
from router.output.formats import check_names

REMEMBERED_S = 600.0
"""How long a model without nodes is known: requests for it get 503 that long, then 404."""
_DOES = {"generate": "generates text", "embed": "embeds texts", "score": "scores pairs of texts"}


class ModelCatalog:
    """The content of `/v1/models`.

    One model is the *main* one: the configured model, else the oldest that generates. The options on names, templates and
    parsers are for it, and it stays the main one as long as it is known.
    """

    def __init__(self, config: RouterConfig, *, remembered_s: float = REMEMBERED_S) -> None:
        self._configured = config.model
        self._served_names = listed("served_model_name", config.served_model_name)
        check_names(config.tool_call_parser, config.reasoning_parser)
        self._main_options = LoadOptions(
            config.chat_template,
            config.generation_config,
            config.tool_call_parser,
            config.reasoning_parser,
            config.fit_conversations,
            config.tokenizer,
        )
        self._other_options = LoadOptions(
            generation_config=config.generation_config, fit_conversations=config.fit_conversations
        )
        self._preloads = Preloads(listed("preload", config.preload), self._main_options)
        self._allow_mixed_weights = config.allow_mixed_weights
        self._remembered_s = remembered_s
        self._given: ServedModel | None = None
        """The configured model."""
        self._records: list[NodeRecord] = []
        """What nodes have registered."""
        self._registered: dict[str, RegisteredModel] = {}
        """All that nodes registered, by that name; the oldest first."""
        self._main: RegisteredModel | None = None
        self._main_model: ServedModel | None = None
        """The main model under the first of its names, once it is loaded."""
        self._by_name: dict[str, ServedModel] = {}
        """The loaded models under each name that clients may use; those of the main one first."""
        self._forget_timers: dict[str, asyncio.TimerHandle] = {}
        """A timer for each registered model without nodes."""

    async def load_configured(self) -> None:
        """Load the configured model, if there is one; begin to load those that nodes will register.

        Raises: ConfigError when it cannot be used.
        """
        if self._configured is not None:
            self._given = await asyncio.to_thread(served_model.load, self._configured, None, self._main_options)
            self._publish()
        self._preloads.start()

    def accept(self, records: list[NodeRecord]) -> list[NodeRecord]:
        """Return the nodes whose models this router can serve. What the configuration leaves open comes from them."""
        self._records = records
        found: defaultdict[str, list[NodeRecord]] = defaultdict(list)
        for record in sorted(records, key=lambda record: record.started_at):
            found[record.model.name].append(record)
        for name in found:
            if name not in self._registered:
                self._registered[name] = RegisteredModel(
                    name,
                    self._other_options,
                    self._preloads,
                    self._publish,
                    allow_mixed_weights=self._allow_mixed_weights,
                )
        self._choose_main(found)
        used: set[str] = set()
        for name, model in self._registered.items():
            used.update(record.peer.incarnation for record in model.update(found[name]))
            self._remember(model)
        self._publish()
        return [record for record in records if record.peer.incarnation in used]

    def _choose_main(self, found: Mapping[str, list[NodeRecord]]) -> None:
        """Find the main model. `found`: the records of each name, the oldest first."""
        given = self._given
        names = {*self._served_names, *([] if given is None else [given.name, given.path])}

        def fits(model: RegisteredModel) -> bool:
            if given is None or model.name in names or model is self._main:
                return True
            digests = {record.model.tokenizer for record in found.get(model.name, [])}
            return not digests.isdisjoint((given.tokenizer_digest, ""))

        def rank(model: RegisteredModel) -> tuple[bool, bool, bool, float]:
            oldest = next(iter(found.get(model.name, [])), None)
            task, started_at = (model.task, math.inf) if oldest is None else (oldest.model.task, oldest.started_at)
            return model.name in names, task == "generate", model is self._main, -started_at

        main = max(filter(fits, self._registered.values()), key=rank, default=None)
        if self._main is not None and self._main is not main:
            self._main.use(self._other_options, None)
        if main is not None:
            main.use(self._main_options, given)
        self._main = main

    def _remember(self, model: RegisteredModel) -> None:
        """Forget the model some time after its last node vanished, unless another one comes."""
        name, timer = model.name, self._forget_timers.get(model.name)
        if timer is None and not model.records:
            loop = asyncio.get_running_loop()
            self._forget_timers[name] = loop.call_later(self._remembered_s, self._forget, name)
        elif timer is not None and model.records:
            self._forget_timers.pop(name).cancel()

    def _forget(self, name: str) -> None:
        del self._forget_timers[name]
        model = self._registered.pop(name)
        model.close()
        self._main = None if model is self._main else self._main
        # Another one may be the main model now.
        self.accept([record for record in self._records if record.model.name in self._registered])

    def get(self, name: str | None) -> ServedModel:
        """The model that a client named; None, or an empty name: the one to use if the client names none.

        Raises: NotFound for an unknown name; Unavailable for a model that is not loaded; BadRequest if a name is needed.
        """
        if not name:
            return self.default("generate")
        model = self._by_name.get(name)
        if model is None:
            raise self._unknown(name)
        return model

    def model_for(self, name: str | None, *tasks: Task) -> ServedModel:
        """The model `name`, which must do one of `tasks`; without a name or with an empty one, `default(*tasks)`.

        Raises: NotFound, Unavailable; BadRequest for a model that does something else, with those that would do.
        """
        model = self.get(name) if name else self.default(*tasks)
        if model.task in tasks:
            return model
        wanted = " or ".join(_DOES[task] for task in tasks)
        names = ", ".join(repr(each.name) for each in self.models if each.task in tasks)
        raise BadRequest(
            f"the model {model.name!r} {_DOES[model.task]}; this call needs one that {wanted}: "
            + (names or "this server has none"),
            param="model",
            code="wrong_model",
        )

    def default(self, *tasks: Task) -> ServedModel:
        """The model for a call that names none and needs one of `tasks`, the first if there is such a model: the only one with
        nodes, else the main one.

        Raises: Unavailable while none is known; BadRequest when there are several.
        """
        main = self._main_model
        for task in tasks:
            fitting = [each for each in map(self._shown, self._registered.values()) if each and each.task == task]
            if len(fitting) == 1:
                return fitting[0]
            if main is not None and main.task == task and (self._given is not None or not fitting):
                return main
            if fitting:
                names = ", ".join(repr(each.name) for each in fitting)
                raise BadRequest(f"model is required: this server has {names}", param="model", code="model_required")
        if main is None:
            raise self._unknown(None)
        return main

    def _shown(self, model: RegisteredModel) -> ServedModel | None:
        """The model under the first of its names, if it has nodes and is loaded."""
        return None if not model.records else self._main_model if model is self._main else model.served

    def _unknown(self, name: str | None) -> NotFound | Unavailable:
        """Why there is no model of this name, or (None) none at all."""
        registered = [each for each in self._registered.values() if name in (None, each.name) and each.served is None]
        if registered:
            return Unavailable(f"the model {registered[0].name!r} is not known yet: {registered[0].problem}")
        if not self._by_name:
            return Unavailable("the model is not known yet: no node has registered a model yet")
        shown = ", ".join(map(repr, self._by_name))
        return NotFound(
            f"the model {str(name)[:200]!r} does not exist; this server has {shown}",
            param="model",
            code="model_not_found",
        )

    @property
    def is_loading(self) -> bool:
        """Whether a model that nodes have registered is neither loaded nor refused yet."""
        return any(each.records and each.served is None and not each.is_refused for each in self._registered.values())

    @property
    def refusals(self) -> list[str]:
        """Why models that nodes registered cannot be served."""
        return [f"the model {each.name!r}: {each.problem}" for each in self._registered.values() if each.is_refused]

    @property
    def ignored_nodes(self) -> list[str]:
        """Which nodes are not used because of what they registered, and why."""
        return sorted(why for each in self._registered.values() for why in each.ignored.values())

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """The name under which nodes registered and the role, for each role that each known model needs or has had."""
        return [(each.name, role) for each in self._registered.values() for role in sorted(each.roles)]

    @property
    def models(self) -> list[ServedModel]:
        """The loaded models under each of their names; the main one first."""
        return list(self._by_name.values())

    def close(self) -> None:
        """Stop loading."""
        self._preloads.close()
        for timer in self._forget_timers.values():
            timer.cancel()
        for model in self._registered.values():
            model.close()

    def _publish(self) -> None:
        """Make `_by_name` from what is known now."""
        main = self._given if self._main is None else self._main.served
        names = [] if main is None else self._served_names or [main.name]
        by_name = {name: replace(main, name=name, root=names[0]) for name in names if main is not None}
        self._main_model = by_name[names[0]] if names else None
        for model in self._registered.values():
            if model is not self._main and model.served is not None:
                by_name.setdefault(model.name, model.served)
        for model in self._registered.values():
            parent = self._main_model if model is self._main else model.served
            if parent is not None:
                for adapter in model.adapters:
                    path = model.adapter_paths.get(adapter.name, "")
                    adapted = replace(parent, name=adapter.name, adapter=adapter, adapter_path=path)
                    by_name.setdefault(adapter.name, adapted)
        self._by_name = by_name

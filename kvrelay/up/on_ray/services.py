"""Plans the services of `kvrelay up --on ray`: the commands of `kvrelay.up.plan`, for hosts that Ray chooses. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.base.errors import ConfigError
from common.cluster.desired_state import Counts
from common.config.service_configs import RouterConfig, UpConfig
from common.config.sources import Source
from kvrelay.up.models import UpModel
from kvrelay.up.on_ray.placement import Resources
from kvrelay.up.plan import nodes_of, role_options, service_command
from kvrelay.up.routers import ADMIN_HOST, RouterPlace

HOST = "{host}"
"""Stands in a command for the address of the host that Ray has chosen."""


@dataclass(frozen=True)
class RayService:
    """One service, on as many hosts as its placement needs."""

    name: str
    role: str
    words: tuple[str, ...]
    """What follows `kvrelay` on its command line, with `HOST`."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: int = 1
    of_rank: Resources = field(default_factory=dict[str, float])
    place: RouterPlace | None = None
    """Routers only: they run on the host of `kvrelay up`."""

    @property
    def digest(self) -> str:
        """Differs between services that were started with other options."""
        text = json.dumps([self.words, sorted(self.environ.items()), self.ranks])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class RayServices:
    """What a cluster consists of, for any number of nodes."""

    def __init__(
        self,
        config: UpConfig,
        sources: Mapping[str, Source],
        model: UpModel,
        routers: Sequence[RouterPlace],
        admin_token: str,
        environ: Mapping[str, str],
        *,
        with_gpus: bool,
    ) -> None:
        """environ: options that were set by variables, for all services; other hosts do not have them."""
        self._config, self._sources, self._model, self._environ = config, sources, model, environ
        self._routers, self._with_gpus = routers, with_gpus
        self._of_all = {"redis_url": config.redis_url or "", "cluster": config.cluster, "admin_token": admin_token}

    def wanted(self, counts: Counts) -> list[RayService]:
        """Routers first: they wait for nodes."""
        services = [self._router(place) for place in self._routers]
        for role, cls, _ in nodes_of(self._model, self._config):
            own = {**self._of_all, "host": HOST, "advertise_host": "none", "port": "0", "data_port": "0"}
            own |= {"admin_host": HOST, "admin_port": "0", "model": self._model.model}
            own |= role_options(cls.section, self._config, None)
            ranks = self._config.ranks_of(cls.section)
            per_rank = {"CPU": self._config.ray_cpus_per_rank, **({"GPU": 1.0} if self._with_gpus else {})}
            for number in range(counts.get(cls.section, 0)):
                name = f"{role}-{number}"
                argv, environ = service_command(cls, self._config, self._sources, {**own, "node_id": name})
                services.append(RayService(name, role, _words(argv), {**self._environ, **environ}, ranks, per_rank))
        return services

    def _router(self, place: RouterPlace) -> RayService:
        own = {**self._of_all, "host": self._config.host, "port": str(place.port)}
        own |= {"admin_host": ADMIN_HOST, "admin_port": str(place.admin_port)}
        argv, environ = service_command(RouterConfig, self._config, self._sources, own)
        return RayService(place.name, "router", _words(argv), {**self._environ, **environ}, place=place)


def _words(argv: tuple[str, ...]) -> tuple[str, ...]:
    return argv[argv.index("kvrelay") + 1 :]


def check_options(config: UpConfig, sources: Mapping[str, Source]) -> None:
    """Raises: ConfigError for options that do not work on Ray."""
    if "file" in sources.values():
        raise ConfigError("--on ray takes no configuration file, which other hosts do not have: use flags or variables")
    if config.redis_url is None:
        raise ConfigError("--on ray needs --redis-url: a Redis that all hosts reach, and that outlives `kvrelay up`")
    if config.tls:
        raise ConfigError("--tls works on one machine: it makes certificates that other hosts do not have")

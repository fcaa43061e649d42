"""A node's options, resolved once at its start into small groups. The server and the adapters get their group; ranks get the
`NodePlan`, which holds the others. Pure data."""

from __future__ import annotations

import dataclasses
import logging
import platform
import secrets
from dataclasses import dataclass
from typing import Any

from common.base.cores import usable_cores
from common.base.endpoints import is_loopback
from common.base.errors import ConfigError
from common.base.sentences import counted
from common.cluster.address import HostAddresses
from common.config.fields import listed
from common.config.option_groups import LoadFormat, LoraOptions, Quantization
from common.config.service_configs import NodeConfig
from common.control.messages import Role
from common.control.self_report import public_options
from common.model.config import ModelConfig
from common.model.description import MixtureDescription
from common.model.generic.config import GenericConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """How a node is named and reached, and how it takes part in the cluster."""

    node_id: str
    addresses: HostAddresses
    port: int
    """Port of the control socket; 0 picks a free one."""
    redis_url: str
    cluster: str
    lease_s: float
    tls_dir: str | None
    admin_host: str
    admin_port: int
    admin_token: str
    """If it is empty, there is no admin port."""
    shown: dict[str, Any]
    """All options of the service, without secrets, for operators."""

    @classmethod
    def of(cls, role: Role, config: NodeConfig) -> ServerOptions:
        """Without a configured node id the node gets one that no other node has."""
        return cls(
            node_id=config.node_id or f"{role}-{platform.node()}-{secrets.token_hex(3)}",
            addresses=HostAddresses.of(config),
            port=config.port,
            redis_url=config.redis_url,
            cluster=config.cluster,
            lease_s=config.lease_s,
            tls_dir=config.tls_dir,
            admin_host=config.admin_host,
            admin_port=config.admin_port,
            admin_token=config.admin_token,
            shown=public_options(config),
        )


@dataclass(frozen=True)
class RankHosts:
    """The hosts that a node's ranks are spread over, and how long ranks wait for each other."""

    ranks_here: range
    """The ranks that run on this host."""
    num_hosts: int
    addresses: HostAddresses
    leader_host: str
    """Address of the leader's host for ranks on other hosts."""
    leader_port: int
    """Port of the leader's socket for reports; 0 picks a free one, which works on a single host only."""
    rank_timeout_s: float
    """Longest wait for another rank; must exceed the longest step."""
    start_timeout_s: float
    lease_s: float
    tls_dir: str | None
    threads: int | None
    """Compute threads of each rank on this host; None: PyTorch's choice."""
    fields: dict[str, Any]
    """The node's configuration, which each rank's process resolves again."""

    @classmethod
    def of(cls, config: NodeConfig, world_size: int) -> RankHosts:
        """Several ranks on one host get an equal share of its cores, unless `threads` is configured.

        Raises: ConfigError if the ranks do not spread evenly over the hosts.
        """
        if world_size % config.nnodes or not 0 <= config.node_rank < config.nnodes:
            raise ConfigError(
                f"{counted(world_size, 'rank')} cannot be spread evenly over {counted(config.nnodes, 'host')} (this is "
                f"host {config.node_rank})"
            )
        if config.nnodes > 1 and is_loopback(config.host) and not is_loopback(config.master_addr):
            raise ConfigError(f"ranks on other hosts cannot reach {config.host}: set --host to an address of this host")
        each = world_size // config.nnodes
        threads = config.threads
        if threads is None and each > 1:
            threads = max(1, usable_cores() // each)
        return cls(
            ranks_here=range(config.node_rank * each, (config.node_rank + 1) * each),
            num_hosts=config.nnodes,
            addresses=HostAddresses.of(config),
            leader_host=config.master_addr,
            leader_port=config.master_port,
            rank_timeout_s=config.rank_timeout_s,
            start_timeout_s=config.start_timeout_s,
            lease_s=config.lease_s,
            tls_dir=config.tls_dir,
            threads=threads,
            fields={**dataclasses.asdict(config), "threads": threads},
        )

    @property
    def same_host(self) -> bool:
        """All ranks of the node are on one host."""
        return self.num_hosts == 1


@dataclass(frozen=True)
class WeightOptions:
    """How a rank gets its weights."""

    dtype: str
    """Data type of weights and activations; that of the KV cache is in the layout."""
    load_format: LoadFormat
    seed: int
    """Seed of dummy weights."""
    quantization: Quantization
    packed_cache_gb: float | None
    state: str
    """State of the weight files (`files_state`) before the fingerprint was made of them."""


@dataclass(frozen=True)
class AdapterOptions:
    """LoRA adapters of a node."""

    folders: dict[str, str]
    """Folder of each configured adapter, by its name."""
    max_loras: int
    max_rank: int

    @classmethod
    def of(cls, options: LoraOptions) -> AdapterOptions:
        """Raises: ConfigError for a malformed `--lora`."""
        folders: dict[str, str] = {}
        for text in listed("lora", options.lora):
            name, _, path = text.partition("=")
            if not name or not path:
                raise ConfigError(f"--lora {text!r} is not NAME=FOLDER")
            if name in folders:
                raise ConfigError(f"--lora names two adapters {name!r}")
            folders[name] = path
        return cls(folders, options.max_loras, options.max_lora_rank)


def check_data_parallel(options: NodeConfig, model: ModelConfig) -> None:
    """Refuse `--data-parallel-attention` where it cannot work. Raises: ConfigError."""
    if not options.data_parallel_attention:
        return
    numbers = _numbers_of_experts(model)
    if not numbers:
        raise ConfigError(
            f"--data-parallel-attention needs a native family with experts, which {model.architecture} is not"
        )
    ranks = options.tensor_parallel_size
    if not 1 < ranks <= min(numbers):
        raise ConfigError(
            f"--data-parallel-attention needs from 2 to {min(numbers)} ranks, as many as there are experts: "
            f"--tensor-parallel-size is {ranks}"
        )
    if options.context_parallel > 1:
        raise ConfigError("--data-parallel-attention does not work with context-parallel ranks")


def _numbers_of_experts(model: ModelConfig) -> list[int]:
    """How many experts each mixture has, in families whose experts are placed by us."""
    if isinstance(model, GenericConfig):
        return []
    return [layer.mlp.router.num_experts for layer in model.layers if isinstance(layer.mlp, MixtureDescription)]


@dataclass(frozen=True)
class ExpertSettings:
    """How a mixture's experts are placed on the ranks of a stage."""

    threshold: float | None
    """Load of the most loaded rank over the mean above which experts move; None: they never do."""
    redundant: int
    """Slots of each layer beside one for each expert."""

    @property
    def redundant_slots(self) -> int | None:
        """`redundant`; None if experts never move."""
        return None if self.threshold is None else self.redundant

    @classmethod
    def of(cls, options: NodeConfig, model: ModelConfig) -> ExpertSettings:
        """Raises: ConfigError where no expert can move, or for more redundant slots than replicas can fill."""
        threshold, redundant, tp_size = (
            options.rebalance_experts,
            options.redundant_experts,
            options.tensor_parallel_size,
        )
        if threshold is None:
            if redundant:
                raise ConfigError("--redundant-experts needs --rebalance-experts, which fills these slots")
            return cls(None, 0)
        numbers = _numbers_of_experts(model)
        if not numbers:
            raise ConfigError(
                f"--rebalance-experts needs a native family with experts, which {model.architecture} is not"
            )
        if options.context_parallel > 1:
            raise ConfigError("--rebalance-experts does not work with context-parallel ranks")
        if tp_size == 1:
            log.info("--rebalance-experts changes nothing here: one tensor-parallel rank holds all experts")
            return cls(None, 0)
        if redundant > min(numbers) * (tp_size - 1):
            raise ConfigError(
                f"--redundant-experts {redundant}: {counted(tp_size, 'rank')} can hold at most "
                f"{min(numbers) * (tp_size - 1)} replicas of {min(numbers)} experts"
            )
        return cls(threshold, redundant)

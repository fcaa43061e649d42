"""Options of a node that are checked against its model, its ranks and its hosts. Its plan holds the results. Pure data."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from common.base.cores import usable_cores
from common.base.endpoints import is_loopback
from common.base.errors import ConfigError
from common.base.sentences import counted
from common.config.fields import listed
from common.config.option_groups import LoraOptions
from common.config.service_configs import NodeConfig
from common.model.config import ModelConfig
from common.model.description import MixtureDescription
from common.model.generic.config import GenericConfig

log = logging.getLogger(__name__)


def ranks_of_host(config: NodeConfig, world_size: int) -> range:
    """The ranks that run on this host. Raises: ConfigError if a node's ranks do not spread evenly over its hosts."""
    if world_size % config.nnodes or not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(
            f"{counted(world_size, 'rank')} cannot be spread evenly over {counted(config.nnodes, 'host')} (this is "
            f"host {config.node_rank})"
        )
    if config.nnodes > 1 and is_loopback(config.host) and not is_loopback(config.master_addr):
        raise ConfigError(f"ranks on other hosts cannot reach {config.host}: set --host to an address of this host")
    each = world_size // config.nnodes
    return range(config.node_rank * each, (config.node_rank + 1) * each)


def share_cores(config: NodeConfig, num_ranks: int) -> NodeConfig:
    """`config` with an equal share of this host's cores for each of its `num_ranks` ranks, unless `threads` is configured. One
    rank keeps PyTorch's choice."""
    if config.threads is not None or num_ranks == 1:
        return config
    return replace(config, threads=max(1, usable_cores() // num_ranks))


def lora_folders(options: LoraOptions) -> dict[str, str]:
    """The folder of each configured adapter, by its name. Raises: ConfigError for a malformed `--lora`."""
    folders: dict[str, str] = {}
    for text in listed("lora", options.lora):
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora {text!r} is not NAME=FOLDER")
        if name in folders:
            raise ConfigError(f"--lora names two adapters {name!r}")
        folders[name] = path
    return folders


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
        threshold, redundant = options.rebalance_experts, options.redundant_experts
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
        tp_size = options.tensor_parallel_size
        if tp_size == 1:
            log.info("--rebalance-experts changes nothing here: one tensor-parallel rank holds all experts")
            return cls(None, 0)
        if redundant > min(numbers) * (tp_size - 1):
            raise ConfigError(
                f"--redundant-experts {redundant}: {counted(tp_size, 'rank')} can hold at most "
                f"{min(numbers) * (tp_size - 1)} replicas of {min(numbers)} experts"
            )
        return cls(threshold, redundant)

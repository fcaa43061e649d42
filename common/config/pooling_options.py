"""Which options of `kvrelay prefill` a node of a pooling model uses; others are refused. Pure except for a log line."""

from __future__ import annotations

import logging

from common.base.errors import ConfigError
from common.config.fields import flag
from common.config.service_configs import PrefillConfig
from common.config.sources import Resolved

log = logging.getLogger(__name__)

OF_PROCESS = frozenset(
    {
        *("cluster", "log_level", "log_format", "host", "port", "node_id", "advertise_host", "redis_url", "lease_s"),
        *("tls_dir", "admin_host", "admin_port", "admin_token", "threads", "nice", "start_timeout_s"),
    }
)
"""The used options that do not depend on the model."""
USED = OF_PROCESS | {"model", "served_model_name", "task", "max_model_len", "max_num_batched_tokens", "max_num_seqs"}
_USED_BY_DECODERS = frozenset({"dtype", "load_format", "seed", "quantization"})
_AS_ENCODERS_ARE = {"dtype": "float32"}
_AS_NODES_ARE = {"device": "cpu", "model_impl": "native"}


def check_options(resolved: Resolved[PrefillConfig], *, is_encoder: bool) -> None:
    """Refuse unused options that were given as flags; log those from a file or a variable, which may be meant for other nodes.

    Raises: ConfigError naming an option that would change nothing.
    """
    used = USED if is_encoder else USED | _USED_BY_DECODERS
    same = {**_AS_NODES_ARE, **(_AS_ENCODERS_ARE if is_encoder else {})}
    unused: list[str] = []
    for name, source in resolved.sources.items():
        value, default = getattr(resolved.config, name), getattr(PrefillConfig, name)
        if name in used or source == "default" or value in (default, same.get(name, default)):
            continue
        if source == "flag":
            raise ConfigError(
                f"{flag(name)} has no effect on a node of a pooling model, which runs on the CPU as one rank and keeps no KV: leave "
                "it out"
            )
        unused.append(flag(name))
    if unused:
        log.info("these options have no effect on a node of a pooling model: %s", ", ".join(unused))

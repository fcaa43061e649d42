"""`kvrelay up`."""

from __future__ import annotations

import asyncio

from common.config.cli import service_app
from common.config.service_configs import UpConfig
from common.config.sources import Resolved
from kvrelay.up.fork_client import fork_servers_for
from kvrelay.up.vllm_command_line import translate

_HELP = """Start a whole cluster on this machine: Redis, routers, prefill nodes and decode nodes.

Each service runs in its own process. Once all are ready, it prints their addresses and a curl command to try. A service
that dies later is restarted; Ctrl-C stops everything in order. Nodes share all processor cores; --favor sets priorities.

[bold]Examples:[/bold] kvrelay up

  kvrelay up --model Qwen/Qwen2.5-0.5B-Instruct --prefill 1 --decode 2 --port 9000

  kvrelay up --routers 2 --port 9000

  kvrelay up --model ./my-model --dtype bfloat16 --favor itl --pid-file /tmp/kvrelay.json
"""


def _run(resolved: Resolved[UpConfig]) -> None:
    if resolved.config.on == "ray":
        from kvrelay.up.on_ray.up import up_on_ray

        asyncio.run(up_on_ray(resolved.config, resolved.sources))
        return
    # The nodes' server imports PyTorch while this process imports the rest.
    with fork_servers_for(resolved.config.device) as fork_servers:
        from kvrelay.up.supervisor import up

        asyncio.run(up(resolved.config, resolved.sources, fork_servers))


app = service_app(UpConfig, help=_HELP, run=_run)

_SERVE_HELP = """Serve a model with a whole cluster on this machine: `kvrelay up --model MODEL`, with the options of vLLM too.

The options are those of `kvrelay up`, and vLLM's: those become ours, or have no effect, which the log says, or are refused with
what to use instead (docs/vllm-options.md lists them all).

[bold]Example:[/bold] kvrelay serve Qwen/Qwen2.5-0.5B-Instruct --port 9000 --max-model-len 4096 --dtype bfloat16
"""

serve = service_app(UpConfig, help=_SERVE_HELP, run=_run, name="serve", argument="model", translate=translate)

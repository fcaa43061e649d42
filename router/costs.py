"""What serving costs in seconds. Pure; runs in the router process, on its event loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Coefficients that all nodes of one role share; a node's own factors stand in the `Fleet`'s columns."""

    prefill_base_s: float = 0.004
    """Per prompt."""
    prefill_token_s: float = 0.0005
    """Per prompt token computed."""
    prefill_context_s: float = 0.0
    """Per token computed and token before it: what attention adds."""
    transfer_base_s: float = 0.02
    """Per relay."""
    transfer_byte_s: float = 1e-9

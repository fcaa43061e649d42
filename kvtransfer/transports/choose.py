"""Chooses the transport of a pair of ranks from what both ranks offer. Pure.

A receiving rank's data address lists its offers, `<transport>+<endpoint>` each, separated by spaces:

    zmq+tcp://10.0.0.2:7001 shm+unix://3f2a9c.../kvrelay-71be... nccl+tcp://10.0.0.2:7002#GPU-5e1c...

The sender knows its own offers, which have no endpoint, and chooses when the grant arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.base.errors import HandshakeRefused
from common.security.sealed_endpoints import split_key, with_key, without_keys

ZMQ, SHM, GLOO, NCCL, CUDA_IPC = "zmq", "shm", "gloo", "nccl", "cuda_ipc"
COLLECTIVE = (NCCL, GLOO)
_ONE_HOST = (CUDA_IPC, SHM)
_MAX_ADDRESS = 4096
_MAX_FAILED = 1024
FORGET_AFTER_S = 600.0
"""A transport that failed is tried again after this time, since the cause (memory, a firewall) may be gone. Each try may
cost one attempt."""
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class TransportOffer:
    """One transport that a rank can use. A sender's offer has no endpoint."""

    transport: str
    endpoint: str = ""
    host_id: str = ""
    """Shared memory and CUDA IPC need equal ids at both ranks."""
    gpu_id: str = ""
    """For NCCL and CUDA IPC: the GPU that holds this rank's KV."""
    key: bytes | None = None
    """The key of an endpoint whose messages are sealed (`common.security.sealed_sockets`)."""

    def __str__(self) -> str:
        return with_key(f"{self.transport}+{self.endpoint}", self.key) + (f"#{self.gpu_id}" if self.gpu_id else "")


@dataclass(frozen=True)
class ChosenTransport:
    """The transport that a pair of ranks uses, and why in a few words for the log."""

    offer: TransportOffer
    """The receiver's offer."""
    why: str


class TransportFailures:
    """Which transports failed to connect to which address, remembered for `FORGET_AFTER_S`. Bounded."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], tuple[str, float]] = {}
        """By address and transport: the reason, and until when it is remembered. The oldest first."""

    def record(self, address: str, transport: str, reason: str, now: float) -> None:
        """Remember a failure, and forget an earlier one of the same address and transport."""
        self._reasons.pop((address, transport), None)
        if len(self._reasons) >= _MAX_FAILED:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[address, transport] = reason, now + FORGET_AFTER_S

    def of(self, address: str, now: float) -> Mapping[str, str]:
        """The reasons still remembered for `address`, by transport."""
        return {
            transport: reason
            for (failed_address, transport), (reason, until) in self._reasons.items()
            if failed_address == address and now < until
        }


def parse_offers(address: str) -> list[TransportOffer]:
    """The offers in a rank's data address. Unknown transports, of a later version, are kept but never chosen.

    Raises: HandshakeRefused if it is not a list of offers.
    """
    offers: list[TransportOffer] = []
    for text in address[:_MAX_ADDRESS].split():
        transport, plus, endpoint = text.partition("+")
        scheme, separator, rest = endpoint.partition("://")
        if not (transport and plus and scheme and separator and rest):
            raise HandshakeRefused(
                f"{without_keys(text)[:80]!r} in a data address is not <transport>+<scheme>://<endpoint>"
            )
        host_id = rest.partition("/")[0] if transport in _ONE_HOST else ""
        endpoint, _, gpu_id = endpoint.partition("#")
        try:
            endpoint, key = split_key(endpoint)
        except ValueError as error:
            raise HandshakeRefused(f"a data address has no valid key: {error}") from error
        offers.append(TransportOffer(transport, endpoint, host_id, gpu_id, key))
    return offers


def choose(
    src: Iterable[TransportOffer],
    dst: Iterable[TransportOffer],
    wanted: str = "auto",
    failed: Mapping[str, str] = _NONE,
) -> ChosenTransport:
    """The transport from `src` to `dst`, the first that both can use: CUDA IPC on one host, NCCL between two GPUs, shared
    memory on one host, ZMQ, gloo. `wanted` restricts the choice.

    `failed`: transports that failed between these two ranks, with the reason; avoided while another one is left.

    Raises: HandshakeRefused naming the offers of both ranks if they have no wanted transport in common.
    """
    ours, theirs = {o.transport: o for o in src}, {o.transport: o for o in dst}
    allowed = {"auto": (CUDA_IPC, NCCL, SHM, ZMQ, GLOO), "collective": COLLECTIVE}.get(wanted, (wanted,))
    both = [name for name in allowed if name in ours and name in theirs]
    unfit = {name: why for name in both if (why := _unfit(ours[name], theirs[name]))}
    common = [name for name in both if name not in unfit]
    reasons = list(dict.fromkeys(unfit.values()))
    if not common:
        raise HandshakeRefused(
            f"no common KV transport: {wanted} is wanted, the sending rank has {_names(ours)}, the receiving rank "
            f"{_names(theirs)}" + (f" ({'; '.join(reasons)})" if reasons else "")
        )
    name = next((name for name in common if name not in failed), common[0])
    reasons += [f"{other} failed: {failed[other]}" for other in common[: common.index(name)]]
    why = _WHY.get(name, "; ".join(reasons) or "both ranks offer it and nothing faster")
    if name in _WHY and reasons:
        why += f" ({'; '.join(reasons)})"
    return ChosenTransport(theirs[name], why if wanted == "auto" else f"asked for {wanted}; {why}")


_WHY = {
    CUDA_IPC: "both ranks are on one host and hold their KV on CUDA devices",
    SHM: "both ranks are on one host",
    NCCL: "both ranks hold their KV on CUDA devices",
}


def _unfit(ours: TransportOffer, theirs: TransportOffer) -> str:
    """Why these two ranks cannot use a transport that both have; empty if they can."""
    if ours.transport in _ONE_HOST and ours.host_id != theirs.host_id:
        return "not on one host"
    if ours.transport == NCCL and ours.gpu_id and ours.gpu_id == theirs.gpu_id:
        return "NCCL refuses two ranks on one GPU"
    return ""


def _names(offers: Iterable[str]) -> str:
    return ", ".join(sorted(offers)) or "none"

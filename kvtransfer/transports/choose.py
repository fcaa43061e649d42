"""Which transport a pair of ranks uses, from what both ends offer. Pure.

A receiving rank's data address lists its offers, `<transport>+<endpoint>` each, separated by spaces:

    zmq+tcp://10.0.0.2:7001 shm+unix://3f2a9c.../kvrelay-71be... nccl+tcp://10.0.0.2:7002#GPU-5e1c...

A sender knows what it can do itself (the same offers without endpoints), and picks at the grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.base.errors import HandshakeRefused

ZMQ, SHM, GLOO, NCCL, CUDA_IPC = "zmq", "shm", "gloo", "nccl", "cuda_ipc"
COLLECTIVE = (NCCL, GLOO)
_ONE_HOST = (CUDA_IPC, SHM)
_MAX_ADDRESS = 4096
_MAX_FAILED = 1024
FORGET_AFTER_S = 600.0
"""What kept a transport from coming about (no memory left, a firewall) may be mended; a try costs one attempt."""
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class TransportOffer:
    """One transport that an end has. A sender's has no endpoint."""

    transport: str
    endpoint: str = ""
    host_id: str = ""
    """Of shared memory and CUDA IPC: the ends must have the same one."""
    card: str = ""
    """Of NCCL and CUDA IPC: where this end's KV is."""

    def __str__(self) -> str:
        return f"{self.transport}+{self.endpoint}" + (f"#{self.card}" if self.card else "")


@dataclass(frozen=True)
class Choice:
    """What a pair uses, and why in a few words for the log."""

    offer: TransportOffer
    """The receiver's."""
    why: str

    @property
    def transport(self) -> str:
        """Its name."""
        return self.offer.transport


class Failures:
    """Which transports did not come about to which address, for `FORGET_AFTER_S` each. Bounded."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], tuple[str, float]] = {}
        """By address and transport: why, and until when it counts. The oldest first."""

    def note(self, address: str, transport: str, reason: str, now: float) -> None:
        """It failed, once more perhaps."""
        self._reasons.pop((address, transport), None)
        if len(self._reasons) >= _MAX_FAILED:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[address, transport] = reason, now + FORGET_AFTER_S

    def of(self, address: str, now: float) -> Mapping[str, str]:
        """The reasons that still count for `address`, by transport."""
        return {
            transport: reason
            for (place, transport), (reason, until) in self._reasons.items()
            if place == address and now < until
        }


def format_offers(offers: Iterable[TransportOffer]) -> str:
    """A rank's data address."""
    return " ".join(str(offer) for offer in offers)


def parse_offers(address: str) -> list[TransportOffer]:
    """The offers in a rank's data address. Transports of a later version are kept, nobody chooses them.

    Raises: HandshakeRefused if it is no such list.
    """
    offers: list[TransportOffer] = []
    for text in address[:_MAX_ADDRESS].split():
        transport, plus, endpoint = text.partition("+")
        scheme, separator, rest = endpoint.partition("://")
        if not (transport and plus and scheme and separator and rest):
            raise HandshakeRefused(f"{text[:80]!r} in a data address is not <transport>+<scheme>://<place>")
        host_id = rest.partition("/")[0] if transport in _ONE_HOST else ""
        endpoint, _, card = endpoint.partition("#")
        offers.append(TransportOffer(transport, endpoint, host_id, card))
    return offers


def choose(
    src: Iterable[TransportOffer],
    dst: Iterable[TransportOffer],
    wanted: str = "auto",
    failed: Mapping[str, str] = _NONE,
) -> Choice:
    """What `src` and `dst` use, the first that both can: CUDA IPC or shared memory on one host, NCCL between two
    cards, ZMQ. `wanted` may narrow it down.

    `failed`: transports that did not come about between these two ends, with the reason; passed over while there is
    another.

    Raises: HandshakeRefused naming both ends' offers if they share nothing that is wanted.
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
    why = _WHY.get(name, "; ".join(reasons) or "both ends offer it and nothing faster")
    if name in _WHY and reasons:
        why += f" ({'; '.join(reasons)})"
    return Choice(theirs[name], why if wanted == "auto" else f"asked for {wanted}; {why}")


_WHY = {
    CUDA_IPC: "both ends are on one host and hold their KV on CUDA devices",
    SHM: "both ends are on one host",
    NCCL: "both ends hold their KV on CUDA devices",
}


def _unfit(ours: TransportOffer, theirs: TransportOffer) -> str:
    """Why these two cannot use a transport that both have; empty if they can."""
    if ours.transport in _ONE_HOST and ours.host_id != theirs.host_id:
        return "not on one host"
    if ours.transport == NCCL and ours.card and ours.card == theirs.card:
        return "NCCL refuses two ranks on one card"
    return ""


def _names(offers: Iterable[str]) -> str:
    return ", ".join(sorted(offers)) or "none"

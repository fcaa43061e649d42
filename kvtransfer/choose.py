"""Which transport a pair of ranks uses, from what both ends offer. Pure.

A receiving rank's data address lists its offers, `<transport>+<endpoint>` each, separated by spaces:

    zmq+tcp://10.0.0.2:7001 shm+unix://3f2a9c.../kvrelay-71be...

A sender knows what it can do itself (the same offers without endpoints), and picks at the grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.errors import HandshakeRefused

ZMQ, SHM, GLOO, NCCL = "zmq", "shm", "gloo", "nccl"
COLLECTIVE = (NCCL, GLOO)
_MAX_ADDRESS = 4096
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class TransportOffer:
    """One transport that an end has. A sender's has no endpoint."""

    transport: str
    endpoint: str = ""
    host_id: str = ""
    """Of shared memory: the ends must have the same one."""

    def __str__(self) -> str:
        return f"{self.transport}+{self.endpoint}"


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
        host_id = rest.partition("/")[0] if transport == SHM else ""
        offers.append(TransportOffer(transport, endpoint, host_id))
    return offers


def choose(
    src: Iterable[TransportOffer],
    dst: Iterable[TransportOffer],
    wanted: str = "auto",
    failed: Mapping[str, str] = _NONE,
) -> Choice:
    """What `src` and `dst` use: shared memory on one host, else NCCL, else ZMQ; `wanted` may narrow it down.

    `failed`: transports that did not come about between these two ends, with the reason; passed over while there is
    another.

    Raises: HandshakeRefused naming both ends' offers if they share nothing that is wanted.
    """
    ours, theirs = {o.transport: o for o in src}, {o.transport: o for o in dst}
    allowed = {"auto": (SHM, NCCL, ZMQ, GLOO), "collective": COLLECTIVE}.get(wanted, (wanted,))
    common = [name for name in allowed if name in ours and name in theirs]
    reasons: list[str] = []
    if SHM in common and ours[SHM].host_id != theirs[SHM].host_id:
        common.remove(SHM)
        reasons.append("not on one host")
    if not common:
        raise HandshakeRefused(
            f"no common KV transport: {wanted} is wanted, the sending rank has {_names(ours)}, the receiving rank "
            f"{_names(theirs)}" + (f" ({'; '.join(reasons)})" if reasons else "")
        )
    name = next((name for name in common if name not in failed), common[0])
    reasons += [f"{other} failed: {failed[other]}" for other in common[: common.index(name)]]
    why = {SHM: "both ends are on one host", NCCL: "both ends hold their KV on CUDA devices"}.get(
        name, "; ".join(reasons) or "both ends offer it and nothing faster"
    )
    return Choice(theirs[name], why if wanted == "auto" else f"asked for {wanted}; {why}")


def _names(offers: Iterable[str]) -> str:
    return ", ".join(sorted(offers)) or "none"

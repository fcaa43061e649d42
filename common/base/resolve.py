"""Resolves host names outside the event loop, with a deadline. A resolver that hangs blocks one thread per name, not one per
attempt; asyncio's own threads are not used, because they are few and other work needs them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from concurrent.futures import Future


class NameUnknown(OSError):
    """A host name has no address, or none was found in time."""


_LOOKUPS: dict[str, Future[str]] = {}
"""Look-ups in progress, by host name."""
_LOCK = threading.Lock()


async def resolve(host: str, timeout_s: float) -> str:
    """Return an address of `host`: IPv4, or IPv6 if it has no IPv4 address. Raises: NameUnknown."""
    if _is_address(host):
        return host
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(asyncio.wrap_future(_lookup(host)))
    except TimeoutError:
        raise _unknown(host, f" within {timeout_s:g} s") from None


def resolve_now(host: str, timeout_s: float) -> str:
    """Resolve `host` like `resolve`, from a thread without an event loop. Raises: NameUnknown."""
    if _is_address(host):
        return host
    try:
        return _lookup(host).result(timeout_s)
    except TimeoutError:
        raise _unknown(host, f" within {timeout_s:g} s") from None


def is_own(address: str) -> bool:
    """Whether `address` belongs to this host, so that a socket can be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _unknown(host: str, why: str) -> NameUnknown:
    return NameUnknown(f"the name {host[:200]} could not be resolved{why}")


def _lookup(host: str) -> Future[str]:
    """Return the lookup in progress for `host`, or start one."""
    with _LOCK:
        known = _LOOKUPS.get(host)
        if known is not None:
            return known
        found = _LOOKUPS[host] = Future[str]()

    def settle(address: str, why_not: str = "") -> None:
        with _LOCK:
            del _LOOKUPS[host]
        if address:
            found.set_result(address)
        else:
            found.set_exception(_unknown(host, f": {why_not}"))

    def run() -> None:
        try:
            try:
                addresses = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            except socket.gaierror:
                addresses = socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            settle("", str(error))
        else:
            settle(str(addresses[0][4][0]))

    try:
        threading.Thread(target=run, name=f"resolve-{host[:40]}", daemon=True).start()
    except RuntimeError as error:  # the process may not start more threads now
        settle("", str(error))
    return found

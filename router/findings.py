"""What is wrong with a cluster, and what helps: from what its services say to a list of findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.security.expiry import WARN_DAYS

Plain = Mapping[str, Any]

_SKEW_S = 1.0
_DAY_S = 86_400.0
_FILES_USED = 0.8
_MIN_FILES = 1024
_MIN_SHM_BYTES, _MIN_FREE_SHM_BYTES = 128 * 2**20, 32 * 2**20
_MIN_FREE_BYTES = 512e6
_CAPACITY_RATIO, _RANK_RATIO, _RANK_BYTES = 1.1, 1.3, 200e6


class Finding(NamedTuple):
    """One thing that is wrong or suspicious."""

    where: str
    what: str
    remedy: str


@dataclass
class ServiceReport:
    """What one router or node says of itself; what it did not answer is empty, with the reason in `silent`."""

    name: str
    role: str
    facts: Plain = field(default_factory=dict[str, Any])
    status: Plain = field(default_factory=dict[str, Any])
    known: Plain = field(default_factory=dict[str, Any])
    """What a router knows of the node; empty for a router."""
    skew_s: float = 0.0
    """Offset of its clock from this machine's, beyond what the time of the answer's travel explains."""
    silent: str = ""
    closed: bool = False
    """Whether it is silent because it has no admin port for this command, or the port refused the connection."""


def find(routers: Sequence[ServiceReport], nodes: Sequence[ServiceReport], own_version: str) -> list[Finding]:
    """All findings, grouped by kind. `own_version`: of the command that asks; "" outside one."""
    services = [*routers, *nodes]
    answering = [service for service in services if not service.silent]
    found = list(_unanswered(services))
    found += _unreachable(answering, nodes)
    found += _states(nodes)
    for check in (_refused, _refused_nodes, _ignored_nodes, _vanished):
        found += check(routers)
    found += _strangers(routers, nodes)
    found += _versions(answering, own_version)
    found += _fingerprints(nodes)
    found += _contexts(nodes)
    for service in answering:
        for check in (_clock, _certificate, _redis, _process, _shared_memory, _gpus):
            found += check(service)
    found += _imbalance(nodes)
    return [*found, *(finding for router in routers for finding in _index(router))]


def _unanswered(services: Iterable[ServiceReport]) -> Iterator[Finding]:
    for service in services:
        if service.closed:
            yield Finding(
                service.name,
                f"cannot be asked: {service.silent}",
                "start it with the token of this cluster, and with --admin-host if others must reach it",
            )
        elif service.silent:
            yield Finding(service.name, f"does not answer: {service.silent}", "see its log; restart it if it hangs")


def _unreachable(services: Iterable[ServiceReport], nodes: Sequence[ServiceReport]) -> Iterator[Finding]:
    names = {
        address: node.name
        for node in nodes
        for address in [str(node.known.get("control_address")), *" ".join(node.known.get("data_addresses", [])).split()]
    }
    for service in services:
        for address, why in service.facts.get("unreachable", {}).items():
            yield Finding(
                service.name,
                f"cannot connect to {names.get(address, 'a node')} at {address}: {why}",
                "allow the connection in the firewall; if the address is wrong, set --advertise-host of that node",
            )


def _states(nodes: Iterable[ServiceReport]) -> Iterator[Finding]:
    for node in nodes:
        state, breaker = node.known.get("state", "usable"), node.known.get("breaker", {}).get("state", "closed")
        if state == "draining":
            yield Finding(node.name, "drains: it gets no new requests", f"kvrelay admin undrain {node.name}")
        elif state != "usable" and (node.closed or not node.silent):
            yield Finding(node.name, f"the router does not use it: {state}", "see its log, and the router's")
        if breaker != "closed":
            yield Finding(
                node.name, f"its circuit breaker is {breaker}: requests failed there", "see its log for the reason"
            )
        if node.status.get("engine", "ok") != "ok":
            yield Finding(node.name, f"engine: {node.status['engine']}", f"kvrelay admin profile {node.name}")


def _refused(routers: Iterable[ServiceReport]) -> Iterator[Finding]:
    for router in routers:
        for refusal in router.status.get("refused", []):
            yield Finding(
                router.name,
                f"does not serve {refusal}",
                "put the model's files where its nodes have them on the router's host too, and see the router's log",
            )


def _refused_nodes(routers: Sequence[ServiceReport]) -> Iterator[Finding]:
    reasons: dict[str, str] = {}
    for router in routers:
        reasons |= router.status.get("refused_nodes", {})
    for node_id, reason in sorted(reasons.items()):
        yield Finding(
            node_id,
            f"routers ignore it, as they refuse its record in Redis: {reason}",
            "give it the version of kvrelay that the routers have, or a certificate of their authority (kvrelay keys issue)",
        )


def _ignored_nodes(routers: Sequence[ServiceReport]) -> Iterator[Finding]:
    for why in sorted({why for router in routers for why in router.status.get("ignored_nodes", [])}):
        node_id, _, reason = why.partition(" is ignored: ")
        yield Finding(
            node_id,
            f"routers ignore it: {reason}",
            "give it the model, --dtype, --kv-cache-dtype and --quantization of the others, or its model another name",
        )


def _vanished(routers: Sequence[ServiceReport]) -> Iterator[Finding]:
    ages: dict[str, float] = {}
    for router in routers:
        for node_id, age_s in router.status.get("vanished", {}).items():
            ages[node_id] = min(age_s, ages.get(node_id, age_s))
    for node_id, age_s in sorted(ages.items()):
        yield Finding(
            node_id,
            f"has not renewed its registration for {age_s:.0f} s, and did not end in order",
            "see whether its process hangs, is cut off or has died; if it will not come back, this ends after an hour",
        )


def _strangers(routers: Sequence[ServiceReport], nodes: Iterable[ServiceReport]) -> Iterator[Finding]:
    for node in nodes:
        leases = node.status.get("leases")
        holders = {lease["holder"] for lease in leases or ()}
        for router in routers:
            if leases is not None and not router.silent and router.status.get("router_id") not in holders:
                yield Finding(
                    node.name,
                    f"{router.name} holds no lease there: it sends nothing to it",
                    "check that the router reaches the node's control address, and that both use the same Redis and --cluster",
                )


def _versions(services: Iterable[ServiceReport], own: str) -> Iterator[Finding]:
    found: dict[str, dict[str, list[str]]] = {"kvrelay": {own: ["this command"]} if own else {}, "torch": {}}
    for service in services:
        for package, versions in found.items():
            version = service.facts.get("versions", {}).get(package)
            if version:
                versions.setdefault(version, []).append(service.name)
    for package, versions in found.items():
        if len(versions) > 1:
            what = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(versions.items()))
            yield Finding(
                "cluster", f"versions of {package} differ: {what}", "install the same one, then kvrelay admin roll"
            )


def _fingerprints(nodes: Sequence[ServiceReport]) -> Iterator[Finding]:
    first: dict[str, ServiceReport] = {}
    for node in nodes:
        model = str(node.known.get("model"))
        other = first.setdefault(model, node)
        for name, what in (("fingerprint", "weights"), ("kv", "layouts of KV"), ("tokenizer", "tokenizers")):
            if node.known.get(name) != other.known.get(name):
                yield Finding(
                    node.name,
                    f"{what} of {model} differ from those of {other.name}: {node.known.get(name)} and {other.known.get(name)}",
                    "give both the same model files, --dtype, --kv-cache-dtype and --quantization",
                )


def _contexts(nodes: Sequence[ServiceReport]) -> Iterator[Finding]:
    decodes = [node for node in nodes if node.role == "decode" and "max_model_len" in node.known]
    longest_first = sorted(decodes, key=lambda node: node.known["max_model_len"], reverse=True)
    longest = {node.known.get("model"): node for node in reversed(longest_first)}
    for node in decodes:
        other = longest[node.known.get("model")]
        if (shorter := node.known["max_model_len"]) < other.known["max_model_len"]:
            yield Finding(
                node.name,
                f"takes {shorter} tokens, {other.name} {other.known['max_model_len']}: longer requests go to larger nodes only",
                "give all decode nodes the same --max-model-len and enough KV memory for it",
            )


def _clock(service: ServiceReport) -> Iterator[Finding]:
    if abs(service.skew_s) > _SKEW_S:
        yield Finding(
            service.name,
            f"its clock is {abs(service.skew_s):.1f} s {'ahead of' if service.skew_s > 0 else 'behind'} this machine's",
            "synchronize the clocks (chrony, systemd-timesyncd); times in stories and traces are wrong until then",
        )


def _certificate(service: ServiceReport) -> Iterator[Finding]:
    ends = service.facts.get("certificate_ends")
    if ends is not None and (left_s := ends - service.facts["time"]) < WARN_DAYS * _DAY_S:
        yield Finding(
            service.name,
            f"its certificate ends in {left_s / _DAY_S:.1f} days" if left_s > 0 else "its certificate has ended",
            "issue it again (kvrelay keys issue) and copy the folder to its host; no restart is needed",
        )


def _redis(service: ServiceReport) -> Iterator[Finding]:
    state = service.status.get("redis", "ok")
    if state != "ok":
        yield Finding(
            service.name, f"Redis: {state}", "check Redis, --redis-url and the network; requests go on meanwhile"
        )
    if policy := service.status.get("redis_evicts"):
        yield Finding(
            service.name,
            f"Redis evicts keys when its memory is full ({policy})",
            "set maxmemory-policy to noeviction (docs/redis.md): nodes and cached blocks may be missing until they register again",
        )


def _process(service: ServiceReport) -> Iterator[Finding]:
    facts = service.facts
    used, most = facts.get("open_files", 0), facts.get("max_files", 0)
    if most > 0 and (used > _FILES_USED * most or most < _MIN_FILES):
        yield Finding(
            service.name,
            f"{used} of {most} file descriptors are used",
            "raise the limit: ulimit -n 65536, LimitNOFILE= of systemd",
        )
    free = facts.get("free_memory_bytes")
    if free is not None and free < _MIN_FREE_BYTES:
        yield Finding(
            service.name,
            f"only {free / 1e6:.0f} MB of memory are free on {facts.get('host')}",
            "lower --kv-memory-gb, or add memory",
        )


def _shared_memory(service: ServiceReport) -> Iterator[Finding]:
    facts = service.facts
    total, free = facts.get("shm_total_bytes", 0), facts.get("shm_free_bytes", 0)
    if service.role != "router" and facts and (total < _MIN_SHM_BYTES or free < _MIN_FREE_SHM_BYTES):
        yield Finding(
            service.name,
            f"shared memory: {free / 1e6:.0f} of {total / 1e6:.0f} MB are free in /dev/shm",
            "give the container more (shm_size, --shm-size) or remount /dev/shm with size=; ranks and relays fall back to TCP",
        )


def _gpus(service: ServiceReport) -> Iterator[Finding]:
    facts = service.facts
    if not facts.get("gpus"):
        return
    networks, chosen = facts.get("networks", []), facts.get("nccl_socket_ifname")
    if len(networks) > 1 and not chosen:
        yield Finding(
            service.name,
            f"NCCL may take any of {', '.join(networks)}",
            "set NCCL_SOCKET_IFNAME to the interface of the cluster's network",
        )
    elif chosen and not any(name.startswith(chosen.lstrip("=")) for name in networks):
        yield Finding(
            service.name, f"NCCL_SOCKET_IFNAME={chosen}, but the interfaces are {', '.join(networks)}", "correct it"
        )
    if facts.get("gpus_apart"):
        pairs = ", ".join(f"{a} and {b}" for a, b in facts["gpus_apart"])
        yield Finding(
            service.name,
            f"GPUs {pairs} cannot read each other's memory: data between them goes through the host",
            "choose GPUs of one NVLink or PCIe switch with CUDA_VISIBLE_DEVICES (nvidia-smi topo -m shows them)",
        )


def _imbalance(nodes: Sequence[ServiceReport]) -> Iterator[Finding]:
    fleets: dict[tuple[str, str], dict[str, int]] = {}
    for node in nodes:
        blocks = int(node.known.get("load", {}).get("kv_blocks_total", 0))
        if blocks:
            fleets.setdefault((node.role, str(node.known.get("model"))), {})[node.name] = blocks
        yield from _uneven_ranks(node)
    for (role, model), blocks in fleets.items():
        low, high = min(blocks, key=blocks.__getitem__), max(blocks, key=blocks.__getitem__)
        if blocks[high] > _CAPACITY_RATIO * blocks[low]:
            yield Finding(
                low,
                f"KV blocks of {role} nodes of {model} differ: {blocks[low]} here, {blocks[high]} at {high}",
                "free memory on its host, or give all nodes the same --kv-blocks",
            )


def _uneven_ranks(node: ServiceReport) -> Iterator[Finding]:
    sizes = {rank["rank"]: rank["memory_bytes"] for rank in node.status.get("ranks", []) if rank.get("memory_bytes")}
    if not sizes:
        return
    low, high = min(sizes.values()), max(sizes.values())
    if high > _RANK_RATIO * low and high - low > _RANK_BYTES:
        yield Finding(
            node.name,
            "memory of its ranks differs: "
            + ", ".join(f"rank {rank} {size / 1e9:.2f} GB" for rank, size in sizes.items()),
            "split the layers more evenly with --pp-layers",
        )


def _index(router: ServiceReport) -> Iterator[Finding]:
    for name in router.status.get("index", {}).get("silent", []):
        yield Finding(
            router.name, f"blocks of {name} never reached its prefix index", "check that the node can write to Redis"
        )

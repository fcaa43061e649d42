"""What `kvrelay admin check` finds, from what services say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.findings import ServiceReport, find

FACTS: dict[str, Any] = {
    "time": 1e9,
    "certificate_ends": 1e9 + 15 * 86400,
    "versions": {"kvrelay": "1", "torch": "2"},
    "open_files": 50,
    "max_files": 65536,
    "shm_total_bytes": 8e9,
    "shm_free_bytes": 8e9,
    "free_memory_bytes": 8e9,
    "networks": ["eth0"],
    "nccl_socket_ifname": "",
    "gpus": [],
    "unreachable": {},
}


def router() -> ServiceReport:
    return ServiceReport(
        "router-a", "router", dict(FACTS), {"router_id": "router-a", "redis": "ok", "index": {"silent": []}}
    )


def node(name: str) -> ServiceReport:
    ranks = [{"rank": rank, "memory_bytes": 10**9} for rank in range(2)]
    status = {"redis": "ok", "engine": "ok", "leases": [{"holder": "router-a"}], "ranks": ranks}
    known = {"model": "m", "state": "usable", "breaker": {"state": "closed"}, "load": {"kv_blocks_total": 100}}
    known |= {"control_address": f"tcp://{name}:7001", "fingerprint": "f", "kv": "k", "tokenizer": "t"}
    known["max_model_len"] = 64
    return ServiceReport(name, "decode", dict(FACTS), status, known)


def findings(change: Callable[[ServiceReport], object]) -> list[str]:
    """Where and what, after `change` of the first of two nodes."""
    nodes = [node("d0"), node("d1")]
    change(nodes[0])
    return [f"{each.where}: {each.what}" for each in find([router()], nodes, "1")]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert findings(lambda node: None) == []


def test_a_model_that_a_router_cannot_serve_is_named() -> None:
    refusing = router()
    refusing.status["refused"] = ["the model 'm': model directory /m does not exist"]
    (found,) = find([refusing], [node("d0")], "1")
    assert (found.where, found.what) == (
        "router-a",
        "does not serve the model 'm': model directory /m does not exist",
    )


def test_a_node_whose_record_is_refused_is_named_once() -> None:
    """It is in no router's list, and knows nothing of it."""
    routers = [router(), router()]
    for each in routers:
        each.status["refused_nodes"] = {"d2": "its certificate is revoked"}
    (found,) = find(routers, [node("d0")], "1")
    assert (found.where, found.what) == (
        "d2",
        "routers ignore it, as they refuse its record in Redis: its certificate is revoked",
    )


def test_a_node_whose_model_is_not_that_of_older_nodes_is_named_once() -> None:
    routers = [router(), router()]
    for each in routers:
        each.status["ignored_nodes"] = ["d2 is ignored: its dtype of m differs"]
    (found,) = find(routers, [node("d0")], "1")
    assert (found.where, found.what) == ("d2", "routers ignore it: its dtype of m differs")


def test_a_node_that_vanished_is_named_once() -> None:
    """It is in no router's list, however many know that it was there."""
    routers = [router(), router()]
    for each, age_s in zip(routers, (61.0, 59.6), strict=True):
        each.status["vanished"] = {"d2": age_s}
    (found,) = find(routers, [node("d0")], "1")
    assert (found.where, found.what) == ("d2", "has not renewed its registration for 60 s, and did not end in order")


def changed(part: str, **values: Any) -> Callable[[ServiceReport], object]:
    return lambda node: getattr(node, part).update(values)


def no_admin_port(node: ServiceReport) -> None:
    node.silent, node.closed = "no admin port", True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda node: setattr(node, "silent", "no answer"), "d0: does not answer: no answer"),
        (no_admin_port, "d0: cannot be asked: no admin port"),
        (changed("facts", unreachable={"tcp://d1:7001": "refused"}), "d0: cannot connect to d1 at tcp://d1:7001: refused"),
        (changed("known", state="draining"), "d0: drains"),
        (changed("known", state="stuck"), "d0: the router does not use it: stuck"),
        (changed("known", breaker={"state": "open"}), "d0: its circuit breaker is open"),
        (changed("status", engine="no answer: stuck"), "d0: engine: no answer"),
        (changed("status", leases=[]), "d0: router-a holds no lease there"),
        (changed("facts", versions={"kvrelay": "2", "torch": "2"}), "cluster: versions of kvrelay differ: 1: this command, router-a, d1; 2: d0"),
        (changed("known", fingerprint="other"), "d1: weights of m differ from those of d0"),
        (changed("known", kv="other"), "d1: layouts of KV of m differ"),
        (changed("known", tokenizer="other"), "d1: tokenizers of m differ"),
        (changed("known", max_model_len=8), "d0: takes 8 tokens, d1 64: longer requests go to larger nodes only"),
        (changed("known", max_model_len=99), "d1: takes 64 tokens, d0 99"),
        (lambda node: setattr(node, "skew_s", -7.25), "d0: its clock is 7.2 s behind"),
        (changed("facts", certificate_ends=1e9 + 3.5 * 86400), "d0: its certificate ends in 3.5 days"),
        (changed("facts", certificate_ends=1e9 - 1), "d0: its certificate has ended"),
        (changed("status", redis="unreachable"), "d0: Redis: unreachable"),
        (changed("status", redis_evicts="allkeys-lru"), "d0: Redis evicts keys when its memory is full (allkeys-lru)"),
        (changed("facts", open_files=60000), "d0: 60000 of 65536 file descriptors"),
        (changed("facts", max_files=256), "d0: 50 of 256 file descriptors"),
        (changed("facts", free_memory_bytes=2e8), "d0: only 200 MB of memory are free"),
        (changed("facts", shm_total_bytes=64 * 2**20), "d0: shared memory: 8000 of 67 MB"),
        (changed("facts", gpus=[1], networks=["eth0", "ib0"]), "d0: NCCL may take any of eth0, ib0"),
        (changed("facts", gpus=[1], nccl_socket_ifname="ib0"), "d0: NCCL_SOCKET_IFNAME=ib0, but the interfaces are eth0"),
        (changed("facts", gpus=[1, 2], gpus_apart=[(0, 1)]), "d0: GPUs 0 and 1 cannot read each other's memory"),
        (changed("known", load={"kv_blocks_total": 50}), "d0: KV blocks of decode nodes of m differ: 50 here, 100 at d1"),
        (changed("status", ranks=[{"rank": 0, "memory_bytes": 1e9}, {"rank": 1, "memory_bytes": 2e9}]), "d0: memory of its ranks differs"),
    ],
)  # fmt: skip
def test_each_fault_is_one_finding_with_a_remedy(change: Callable[[ServiceReport], object], said: str) -> None:
    [found] = findings(change)
    assert found.startswith(said)
    nodes = [node("d0"), node("d1")]
    change(nodes[0])
    assert all(each.remedy for each in find([router()], nodes, "1"))


def test_only_a_service_that_should_answer_is_to_be_restarted() -> None:
    nodes = [node("d0"), node("d1")]
    no_admin_port(nodes[0])
    nodes[1].silent = "timed out"
    assert ["restart" in each.remedy for each in find([router()], nodes, "1")] == [False, True]


def test_a_node_whose_blocks_never_reached_the_index_is_found_at_its_router() -> None:
    one = router()
    one.status = {**one.status, "index": {"silent": ["d0"]}}
    assert [each.where for each in find([one], [node("d0")], "1")] == ["router-a"]

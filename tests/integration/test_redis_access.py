"""Every kind of access to Redis, on real servers: password, ACL user, TLS, Redis Cluster, Sentinel."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from pathlib import Path

import pytest
from support.certificates import made
from support.ports import free_port
from support.redis_cluster_of_nodes import ANode, ARouter, make_record, names, running, until
from support.redis_servers import ask, binary_with_tls, redis_server_with

from common.base.errors import ConfigError, NotFound
from common.cluster.redis_client import check_redis
from router.http import response_store
from router.http.response_store import ResponseStore, StoredResponse

DOCUMENT = Path(__file__).parents[2] / "docs" / "redis.md"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router gives up storing a response after a second, in which a busy machine may not even connect to a Redis Cluster."""
    monkeypatch.setattr(response_store, "_TIMEOUT_S", 10.0)


def works_with(url: str) -> None:
    """Registration, KV events and their subscription through this URL, and a normal end; stored responses."""

    async def scene() -> None:
        await check_redis(url)
        node, router = ANode(url, "c", make_record("n0")), ARouter(url, "c")
        node.stored(names(3000))
        async with running(router):
            async with running(node):
                await until(lambda: router.holds(node.incarnation, names(3000)))
                node.removed(names(1000))
                await until(lambda: router.holds(node.incarnation, names(2000, 1000)))
            await until(lambda: router.index.match(names(3000)) == {})
        await stores_responses(url)

    asyncio.run(asyncio.wait_for(scene(), 30))


async def stores_responses(url: str) -> None:
    """The oldest makes room, and a deleted one leaves nothing."""
    store = ResponseStore(url, "c", max_entries=2)
    ids = [f"resp_{number:024x}" for number in range(3)]
    for response_id in ids:
        await store.put("a", StoredResponse({"id": response_id}, []))
    with pytest.raises(NotFound):
        await store.get("a", ids[0])
    assert (await store.get("a", ids[1])).response == {"id": ids[1]}
    for response_id in ids[1:]:
        await store.delete("a", response_id)
    assert not await store._client.zrange(store._keys.responses("a"), 0, -1)
    await store._client.set(store._key("a", ids[0]), b"[1]")
    with pytest.raises(NotFound):  # damaged
        await store.get("a", ids[0])
    await store.close()


def refused(url: str) -> str:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(check_redis(url))
    return str(caught.value)


def test_password(tmp_path: Path) -> None:
    with redis_server_with(tmp_path, "requirepass s3cret%") as port:
        works_with(f"redis://:s3cret%25@127.0.0.1:{port}/0")
        assert "s3cret" not in refused(f"redis://:wrong-s3cret@127.0.0.1:{port}/0")
        for without in (f"redis://127.0.0.1:{port}/0", f"redis://127.0.0.1:{port}/0?protocol=2"):
            assert refused(without) == f"cannot reach Redis at {without}: it needs a password"
        assert refused(f"redis+cluster://127.0.0.1:{port}").endswith("it needs a password")


def test_acl_user_with_the_documented_rights_and_no_others(tmp_path: Path) -> None:
    text = re.search(r"ACL SETUSER kvrelay (on .*?)```", DOCUMENT.read_text(), re.S)
    assert text is not None
    rights = " ".join(text.group(1).split())
    with redis_server_with(tmp_path, f"user kvrelay {rights}", "user default off") as port:
        works_with(f"redis://kvrelay:PASSWORD@127.0.0.1:{port}/0")


def test_tls_with_an_authority_of_its_own(tmp_path: Path) -> None:
    binary = binary_with_tls()
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    options = (f"tls-cert-file {certificate}", f"tls-key-file {key}", "tls-auth-clients no")
    with redis_server_with(tmp_path, *options, binary=binary, tls=True) as port:
        works_with(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
        assert "certificate" in refused(f"rediss://127.0.0.1:{port}/0")


@pytest.mark.thorough
def test_redis_whose_certificate_is_wrong_expired_or_revoked_is_refused(tmp_path: Path) -> None:
    """As is one without TLS, and by the server a client without a certificate."""
    binary, trusted = binary_with_tls(), tmp_path / "trusted.pem"
    trusted.write_bytes((made() / "node" / "ca.pem").read_bytes() + (made() / "node" / "crl.pem").read_bytes())
    checks = f"ssl_ca_certs={trusted}&ssl_check_hostname=false&ssl_include_verify_flags=VERIFY_CRL_CHECK_LEAF"
    own = f"ssl_certfile={made() / 'router' / 'cert.pem'}&ssl_keyfile={made() / 'router' / 'key.pem'}"
    for shown in ("node", "stranger", "expired", "revoked"):
        files = made() / shown
        options = (f"tls-cert-file {files / 'cert.pem'}", f"tls-key-file {files / 'key.pem'}")
        options += (f"tls-ca-cert-file {made() / 'node' / 'ca.pem'}", "tls-auth-clients yes")
        with redis_server_with(tmp_path, *options, binary=binary, tls=True) as port:
            url = f"rediss://127.0.0.1:{port}/0?{checks}"
            if shown == "node":
                works_with(f"{url}&{own}")
                refused(url)
            else:
                assert "certificate" in refused(f"{url}&{own}")
    with redis_server_with(tmp_path) as port:
        refused(f"rediss://127.0.0.1:{port}/0?{checks}&{own}")


def test_redis_cluster_by_any_of_its_servers(tmp_path: Path) -> None:
    # A server that gets no processor time for that long would be taken for dead, and the cluster would refuse everything.
    options = ("cluster-enabled yes", "cluster-node-timeout 15000")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(redis_server_with(tmp_path, *options, port=free_port())) for _ in range(3)]
        for index, port in enumerate(ports):
            first, last = index * 5461, 16383 if index == 2 else (index + 1) * 5461 - 1
            ask(port, "CLUSTER", "ADDSLOTS", *range(first, last + 1))
            ask(port, "CLUSTER", "MEET", "127.0.0.1", ports[0])

        async def formed() -> None:
            await until(lambda: all(b"cluster_state:ok" in ask(p, "CLUSTER", "INFO") for p in ports), 20)
            await until(lambda: all(len(ask(p, "CLUSTER", "NODES").splitlines()) == 3 for p in ports), 20)

        asyncio.run(formed())
        for port in ports:
            works_with(f"redis+cluster://127.0.0.1:{port}")
        told = [said for port in ports if (said := _refusal(f"redis://127.0.0.1:{port}/0"))]
        assert len(told) == 2  # the third holds the slot that is asked for
        assert all("redis+cluster://" in said for said in told)


def test_unreachable_redis_cluster_ends_no_service(tmp_path: Path) -> None:
    port, every_slot = free_port(), range(16384)

    def serving(name: str) -> contextlib.AbstractContextManager[int]:
        (tmp_path / name).mkdir()
        return redis_server_with(tmp_path / name, "cluster-enabled yes", port=port)

    async def scene() -> None:
        url = f"redis+cluster://127.0.0.1:{port}"
        node, router = ANode(url, "c", make_record("n0")), ARouter(url, "c")
        node.stored(names(100))
        async with running(node, router):
            with serving("before"):
                ask(port, "CLUSTER", "ADDSLOTS", *every_slot)
                await until(lambda: router.holds(node.incarnation, names(100)))
            await until(
                lambda: router.subscriber.away and router.directory.degraded and node.registrar.unavailable is not None
            )
            node.stored(names(50, 100))
            assert router.holds(node.incarnation, names(100)), "what is known stays known"
            with serving("after"):
                ask(port, "CLUSTER", "ADDSLOTS", *every_slot)
                await until(lambda: router.holds(node.incarnation, names(150)))
                await until(lambda: not router.directory.degraded)

    assert "cannot reach Redis" in _refusal(f"redis+cluster://127.0.0.1:{port}")
    asyncio.run(asyncio.wait_for(scene(), 60))


def _refusal(url: str) -> str:
    try:
        asyncio.run(check_redis(url))
    except ConfigError as error:
        return str(error)
    return ""


def test_sentinel_names_the_server_and_the_one_after_a_failover(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        crash = stack.enter_context(contextlib.ExitStack())
        first = crash.enter_context(redis_server_with(tmp_path))
        second = stack.enter_context(redis_server_with(tmp_path, f"replicaof 127.0.0.1 {first}"))
        watch = (f"sentinel monitor kv 127.0.0.1 {first} 1", "sentinel down-after-milliseconds kv 500")
        sentinel = stack.enter_context(
            redis_server_with(tmp_path, *watch, "sentinel failover-timeout kv 2000", sentinel=True)
        )
        url = f"redis+sentinel://127.0.0.1:{sentinel}/kv"

        async def scene() -> None:
            await until(lambda: ask(second, "INFO", "replication")["master_link_status"] == "up")
            await until(lambda: len(ask(sentinel, "SENTINEL", "REPLICAS", "kv")) == 1, 20)
            node, router = ANode(url, "c", make_record("n0")), ARouter(url, "c")
            node.stored(names(100))
            async with running(node, router):
                await until(lambda: router.holds(node.incarnation, names(100)))
                crash.close()
                await until(lambda: router.subscriber.away)
                node.stored(names(50, 100))
                assert router.holds(node.incarnation, names(100)), "what is known stays known"
                await until(lambda: ask(second, "ROLE")[0] == b"master", 30)
                await until(lambda: router.holds(node.incarnation, names(150)), 10)
                await until(lambda: not router.directory.degraded)

        asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize(
    ("options", "service", "sentence"),
    [
        (
            ("requirepass w",),
            "kv",
            "No master found for 'kv': a Sentinel needs a password of its own, in the URL's option sentinel_password",
        ),
        ((), "other", "No master found for 'other'"),
        (None, "kv", "No master found for 'kv': a Sentinel does not answer"),
    ],
)
def test_sentinel_that_names_no_server_is_told_in_a_sentence(
    tmp_path: Path, options: tuple[str, ...] | None, service: str, sentence: str
) -> None:
    with contextlib.ExitStack() as stack:
        port = free_port()
        if options is not None:
            watch = "sentinel monitor kv 127.0.0.1 1 1"
            stack.enter_context(redis_server_with(tmp_path, watch, *options, port=port, sentinel=True))
        url = f"redis+sentinel://127.0.0.1:{port}/{service}"
        assert refused(url) == f"cannot reach Redis at {url}: {sentence}"


def test_sentinel_with_a_password(tmp_path: Path) -> None:
    with redis_server_with(tmp_path) as port:
        options = (f"sentinel monitor kv 127.0.0.1 {port} 1", "requirepass s3cret")
        with redis_server_with(tmp_path, *options, sentinel=True) as sentinel:
            works_with(f"redis+sentinel://127.0.0.1:{sentinel}/kv?sentinel_password=s3cret")
            said = refused(f"redis+sentinel://127.0.0.1:{sentinel}/kv?sentinel_password=wrong-s3cret")
            assert "s3cret" not in said


def test_malformed_urls_are_reported() -> None:
    for url in ("redis+sentinel://127.0.0.1:26379", "redis://h:notaport/0", "http://h/"):
        with pytest.raises(ConfigError, match="malformed"):
            asyncio.run(check_redis(url))

"""API keys: where they come from, what each class may use, and what a client is told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.mock_clock import MockClock
from support.stub_node import StubNode, make_model_folder, running_stack

from common.base.errors import ConfigError, RateLimited
from common.config.service_configs import RouterConfig
from router.http.api_keys import KeyGuard
from router.http.client import client_of, count_tokens
from router.http.key_limits import LIMIT_HEADERS, ApiKeys, KeyClass, KeyUse, digest_of, read_keys

FILE = f"""
[classes.batch]
requests_per_minute = 2
tokens_per_minute = 100
highest_priority = 10
[keys]
"sk-batch" = "batch"
"sha256:{digest_of("sk-hashed")}" = "default"
"""


def test_file_gives_keys_their_classes_and_holds_digests_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    keys = ApiKeys(("sk-given",), file)
    found = {key: keys.find(key.encode()) for key in ("sk-batch", "sk-hashed", "sk-given")}
    assert {key: use.key_class for key, use in found.items() if use} == {
        "sk-batch": KeyClass(2, 100, 0, 10),
        "sk-hashed": KeyClass(),
        "sk-given": KeyClass(),
    }
    for wrong in ("", "sk-batc", "batch", digest_of("sk-hashed"), "\xff"):
        assert keys.find(wrong.encode()) is None


def test_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    keys = ApiKeys((), file, lambda: now)
    before = keys.find(b"sk-batch")
    for turn, content in enumerate((FILE + '"sk-new" = "batch"\n', "not TOML: sk-secret"), 1):
        file.write_text(content)
        os.utime(file, ns=(turn, turn))
        now += 2
        assert keys.find(b"sk-new") is not None
        assert keys.find(b"sk-batch") is before
    file.write_text("")
    os.utime(file, ns=(9, 9))
    now += 2
    assert keys.find(b"sk-batch") is None
    assert keys  # without any key left, nobody is let in
    file.write_text(FILE)
    os.utime(file, ns=(9, 9))  # it was read while it was written
    now += 2
    assert keys.find(b"sk-batch") is not None


def test_a_key_whose_limits_change_keeps_what_it_uses(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.toml", MockClock()

    def use(**limits: int) -> KeyUse:
        file.write_text("[classes.a]\n" + "".join(f"{k} = {v}\n" for k, v in limits.items()) + '[keys]\nsk-a = "a"')
        os.utime(file, ns=(1, round(clock() + 1)))
        clock.advance(2.0)
        found = keys.find(b"sk-a")
        assert found is not None
        return found

    file.write_text('[keys]\nsk-a = "default"')
    keys = ApiKeys((), file, clock)
    use(requests_per_minute=1, concurrency=1).begin()
    with pytest.raises(RateLimited, match="running"):
        use(requests_per_minute=2, concurrency=1).begin()
    with pytest.raises(RateLimited, match="1 request a minute"):
        use(requests_per_minute=1, concurrency=2).begin()
    clock.advance(60.0)
    use(requests_per_minute=1, concurrency=2).begin()
    with pytest.raises(RateLimited, match="2 requests running"):
        use(concurrency=2).begin()


def test_a_key_of_both_places_has_no_limits_again_when_its_line_is_removed(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.toml", MockClock()
    file.write_text('[classes.a]\nconcurrency = 1\n[keys]\nsk-given = "a"')
    keys = ApiKeys(("sk-given",), file, clock)
    for content, limited in (("", False), ('[classes.a]\nconcurrency = 2\n[keys]\nsk-given = "a"', True), ("", False)):
        file.write_text(content)
        os.utime(file, ns=(len(content), 1))
        clock.advance(2.0)
        found = keys.find(b"sk-given")
        assert found is not None
        assert found.is_limited == limited


def test_file_that_cannot_be_read_now_is_read_as_soon_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions that are mended leave no trace in a file's time: a key that had been removed stayed valid for good."""
    file, clock = tmp_path / "keys.toml", MockClock()
    file.write_text(FILE)
    keys = ApiKeys((), file, clock)

    def finds(key: bytes) -> bool:
        clock.advance(2.0)
        return keys.find(key) is not None

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    file.write_text('[keys]\nnew = "default"')
    with monkeypatch.context() as locked:
        locked.setattr(Path, "read_text", refuse)
        assert [finds(b"sk-batch") for _ in range(3)] == [True] * 3
    assert finds(b"new")
    assert not finds(b"sk-batch")
    assert len([line for line in caplog.messages if "Permission denied" in line]) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("sk-secret = ", "no valid TOML"),
        ("[classes.a]\nrequests = 1", "class 'a' has 'requests'"),
        ("[classes.a]\nconcurrency = -1", "must be a whole number"),
        ("[classes.a]\nconcurrency = true", "must be a whole number"),
        ("[classes.a]\nrequests_per_minute = 1" + 400 * "0", "must be a whole number from 0 to"),
        ("[classes.a]\nhighest_priority = 1" + 30 * "0", "must be a whole number from -1000 to 1000"),
        ("[classes]\na = 1", "class 'a' is no table"),
        ('[keys]\n"sk-secret" = "other"', "key 1 has a class that is not defined; defined are: default"),
        ('[keys]\nbatch = "sk-secret"', "key 1 has a class that is not defined"),
        ('[keys]\n"sk-secret" = ["default"]', "key 1 has a class"),
        ('[keys]\n"" = "default"', "key 1 is empty"),
        (f'[keys]\n"sha256:{digest_of("")}" = "default"', "key 1 is empty"),
        ('[keys]\n"sha256:zz" = "default"', "key 1 is no SHA-256 digest"),
        ("[users]", "not users"),
    ],
)
def test_wrong_file_is_a_config_error_that_quotes_no_key(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(file)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "missing")


def test_requests_come_back_evenly_and_the_refusal_says_when() -> None:
    now = 0.0
    use = KeyUse("k", KeyClass(requests_per_minute=2), lambda: now)
    use.begin()
    use.begin()
    with pytest.raises(RateLimited, match="2 requests a minute") as caught:
        use.begin()
    assert caught.value.retry_after_s == 30
    assert dict(use.headers()) == {
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"60s",
    }
    now = 30.0
    use.begin()
    limited = KeyUse("k", KeyClass(requests_per_minute=2, tokens_per_minute=60), lambda: now)
    assert {name.decode() for name, _ in limited.headers()} == set(LIMIT_HEADERS)


def test_tokens_are_charged_when_they_are_known() -> None:
    now = 0.0
    use = KeyUse("k", KeyClass(tokens_per_minute=60), lambda: now)
    use.begin()
    use.end(90)
    with pytest.raises(RateLimited, match="60 tokens a minute") as caught:
        use.begin()
    assert caught.value.retry_after_s == 31
    now = 31.0
    use.begin()


def test_requests_at_a_time() -> None:
    use = KeyUse("k", KeyClass(concurrency=1))
    use.begin()
    with pytest.raises(RateLimited, match="1 request running"):
        use.begin()
    use.end(0)
    use.begin()


async def _call(guard: KeyGuard, path: str, key: str = "", method: str = "POST") -> tuple[int, dict[bytes, bytes]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
    await guard(scope, _nothing, send)
    return sent[0]["status"], dict(sent[0]["headers"])


async def _nothing() -> Any:
    return {"type": "http.request"}


def test_guard_denies_everything_but_what_load_balancers_ask(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    priorities: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        priorities.append(client_of(scope).highest_priority)
        count_tokens(scope, lambda: 7)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> None:
        refused: list[int] = []
        guard = KeyGuard(app, ApiKeys((), file), lambda error: refused.append(error.http_status))
        for path in ("/health", "/ready", "/ping"):
            assert (await _call(guard, path, method="GET"))[0] == 200
        for path in ("/", "/v1/models", "/metrics", "/health/", "//health", "/%68ealth", "/ui", "/health?x"):
            assert (await _call(guard, path, method="GET"))[0] == 401
            assert (await _call(guard, path, "wrong", method="GET"))[0] == 401
        status, headers = await _call(guard, "/v1/completions", "sk-batch")
        assert (status, headers[b"x-ratelimit-remaining-requests"]) == (200, b"1")
        assert priorities[-1] == 10
        assert (await _call(guard, "/v1/completions", "sk-batch"))[1][b"x-ratelimit-remaining-tokens"] == b"93"
        status, headers = await _call(guard, "/v1/completions", "sk-batch")
        assert (status, headers[b"retry-after"]) == (429, b"30")
        assert refused.count(429) == 1
        assert (await _call(guard, "/v1/completions", "sk-hashed"))[0] == 200

    asyncio.run(main())


def test_work_that_was_sent_to_a_node_is_charged_whatever_becomes_of_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    monkeypatch.setattr(KeyUse, "end", lambda _, tokens: charged.append(tokens))
    folder, keys = make_model_folder(tmp_path / "model"), tmp_path / "keys.toml"
    keys.write_text('[classes.counted]\ntokens_per_minute = 1000\n[keys]\nsk = "counted"')

    async def main() -> None:
        prefill, decode = StubNode("prefill", "p0", str(folder)), StubNode("decode", "d0", str(folder))
        pool = StubNode("prefill", "e0", str(folder), task="embed", hidden_size=8, model_name="pool")
        config = RouterConfig(lease_s=1.0, api_key_file=str(keys))
        async with (
            running_stack(config, prefill, decode, pool) as stack,
            httpx.AsyncClient(base_url=stack.url, headers={"x-api-key": "sk"}) as http,
        ):
            pool.gate.clear()
            call = asyncio.create_task(http.post("/v1/embeddings", json={"model": "pool", "input": [[5, 6, 7]] * 2}))
            await pool.until(lambda: bool(pool.pooling))
            call.cancel()
            await pool.until(lambda: bool(pool.aborts()))
            while not charged:
                await asyncio.sleep(0.001)
            body = {"model": "stub-model", "prompt": [5] * 40, "max_tokens": 2, "n": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            stack.list_nodes(prefill, pool)
            assert (await http.post("/v1/completions", json=body)).status_code == 503

    asyncio.run(asyncio.wait_for(main(), 30))
    assert charged == [6, 46, 0]

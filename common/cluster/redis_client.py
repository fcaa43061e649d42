"""Makes Redis clients: for one server, with or without TLS, for a Redis Cluster, or for the server that a Sentinel names.

    redis://[user:password@]host:port/db      rediss:// the same over TLS, e.g. with ?ssl_ca_certs=/path/ca.pem
    unix:///path                              redis+cluster://host:port      rediss+cluster://host:port
    redis+sentinel://[user:password@]host:port[,host:port...]/service[/db][?sentinel_password=...]

An IPv6 address is in brackets. User and password are percent-encoded.

Used on the asyncio loop of every process. Every Redis error is one of `UNREACHABLE`. After such an error the caller continues
with what it knows, calls `forget_connections` and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import ssl
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import redis.asyncio
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisClusterException, RedisError

from common.base.errors import ConfigError

log = logging.getLogger(__name__)

_SOCKET_TIMEOUT_S = 2.0
_CHECK_TIMEOUT_S = 4.0
_PASSWORD_OPTION = re.compile(r"((?:^|[?&])\w*password=)[^&]*", re.IGNORECASE)
_RESERVED = re.compile(r"[][/?#]")
_OPTIONS = re.compile(r"\?(?=\w+=|$)")
_OWN_OPTION = re.compile(
    r"(?:^|&)(encoding|encoding_errors|decode_responses|parser_class|socket_(?:connect_)?timeout)="
)
"""Options of the Redis client that change what it returns or how long it waits."""
_ENCODE = "percent-encode these characters in user name and password: / ? # @ [ ]"
_SENTINEL_PORT = 26379
UNREACHABLE = (RedisError, RedisClusterException, OSError, TimeoutError)
"""Errors that mean that Redis cannot be used now. RedisClusterException does not derive from RedisError; it is raised if no
server of a Redis Cluster answers, or some slots have no server."""

RedisClient = Any
"""A client of any kind above. It has no type, because the library's annotations combine all options of every command."""


def connect(redis_url: str) -> RedisClient:
    """Make a client without retries. Its operations fail within seconds if Redis is unavailable.

    Raises: ConfigError for a malformed URL.
    """
    parts = _parts(redis_url)
    options: dict[str, Any] = {"socket_timeout": _SOCKET_TIMEOUT_S, "socket_connect_timeout": _SOCKET_TIMEOUT_S}
    try:
        if parts.scheme in ("redis+cluster", "rediss+cluster"):
            plain = redis_url.replace("+cluster", "", 1)
            return RedisCluster.from_url(plain, retry=Retry(NoBackoff(), 1), **options)
        options["retry"] = Retry(NoBackoff(), 0)
        if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
            return _by_sentinel(parts, options)
        client: Any = redis.asyncio.Redis.from_url(redis_url, **options)  # pyright: ignore[reportUnknownMemberType]
        return client
    except (ValueError, TypeError, RedisError) as error:
        raise _malformed(redis_url, _complaint(redis_url, error)) from None


class _Parts(NamedTuple):
    """A URL, split into its parts but not decoded."""

    scheme: str
    login: str
    servers: list[tuple[str, int | None]]
    path: str
    options: str


def _parts(redis_url: str) -> _Parts:
    """Split a URL into its parts. Raises: ConfigError if it is malformed, or a lenient parser would read another server or
    database from it."""
    scheme, separator, rest = redis_url.partition("://")
    if not separator:
        raise _malformed(redis_url, "it has no :// after its scheme, as in redis://host:6379/0")
    place, *options = _OPTIONS.split(rest, maxsplit=1)
    if own := _OWN_OPTION.search("".join(options)):
        raise _malformed(redis_url, f"its option {own[1]} is not allowed")
    login, _, place = place.rpartition("@")
    addresses, _, path = place.partition("/")
    if scheme == "unix":
        return _Parts(scheme, login, [], path, "".join(options))
    if _RESERVED.search(login):
        raise _malformed(redis_url, _ENCODE)
    if scheme.endswith("+sentinel") and not re.fullmatch(r"[^/?#]+(/\d*)?/?", path):
        raise _malformed(redis_url, "its path is not the name of a service, as in redis+sentinel://host:26379/mymaster")
    if scheme in ("redis", "rediss", "redis+cluster", "rediss+cluster") and not re.fullmatch(r"\d*/?", path):
        raise _malformed(redis_url, "its path is not the number of a database, as in redis://host:6379/0")
    try:
        split = [urlsplit("//" + address) for address in addresses.split(",")]
        if len(split) > 1 and not all(each.hostname for each in split):
            raise ValueError("one of its hosts is empty")
        servers = [(each.hostname or "", each.port) for each in split]
    except ValueError as error:
        raise _malformed(redis_url, _complaint(redis_url, error)) from None
    return _Parts(scheme, login, servers, path, "".join(options))


def addresses_of(redis_url: str) -> list[tuple[str, int | None]]:
    """Host and port of each server in the URL, without the brackets of IPv6; empty for a Unix socket.

    Raises: ConfigError for a malformed URL.
    """
    return _parts(redis_url).servers


def _by_sentinel(parts: _Parts, options: dict[str, Any]) -> RedisClient:
    user, _, password = parts.login.partition(":")
    service, _, db = parts.path.rstrip("/").partition("/")
    sentinels = [(host, port or _SENTINEL_PORT) for host, port in parts.servers]
    given = (option.partition("=") for option in parts.options.split("&") if option)
    more: dict[str, Any] = {name: unquote(value) for name, _, value in given}
    tls: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    tls |= {name: more.pop(name) for name in list(more) if name.startswith("ssl_")}  # the Sentinels use the same CA
    own = {name: more.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in more}
    if password:
        more["password"] = unquote(password)
    if user:
        more["username"] = unquote(user)
    watcher: Any = Sentinel(sentinels, sentinel_kwargs={**options, **tls, **own}, **options)
    return watcher.master_for(service, db=int(db or 0), **options, **tls, **more)


async def forget_connections(client: RedisClient) -> None:
    """Make the next operation reconnect, because the address may lead to another server by now.

    After a failover the old server may still answer but refuse writes.
    """
    with contextlib.suppress(*UNREACHABLE):
        pool = getattr(client, "connection_pool", None)
        if pool is not None:
            await pool.disconnect()


def without_password(redis_url: str) -> str:
    """The URL without its password, even if the URL is too malformed to say which part is the password."""
    scheme, separator, rest = redis_url.partition("://")
    if not separator:
        scheme, rest = "", redis_url
    login, _, place = rest.rpartition("@")
    if _PASSWORD_OPTION.search(login):  # the @ may belong to that password
        return scheme + separator + "***"
    return scheme + separator + ("***@" if login else "") + _PASSWORD_OPTION.sub(r"\1***", place)


def _malformed(redis_url: str, why: str) -> ConfigError:
    return ConfigError(f"the Redis URL {without_password(redis_url)} is malformed: {why}")


def _complaint(redis_url: str, error: Exception) -> str:
    """The parser's message, unless that may quote a password which the parser took for something else."""
    login, at, _ = redis_url.partition("://")[2].rpartition("@")
    if at and _RESERVED.search(login):
        return _ENCODE
    # The Redis client's message for an unknown option after the question mark.
    return re.sub(r"^.*an unexpected keyword argument", "no such option here:", str(error))


@contextlib.contextmanager
def tolerated(log: logging.Logger, consequence: str) -> Generator[None]:
    """If Redis cannot be used in the block, log `consequence` with the reason, and continue after the block. Without %."""
    try:
        yield
    except UNREACHABLE as error:
        log.warning(f"{consequence}: %s", short(error))  # a text of its own, by which repetitions are limited


@contextlib.asynccontextmanager
async def brief_client(redis_url: str, log: logging.Logger, consequence: str) -> AsyncGenerator[RedisClient]:
    """A client during the block. If Redis cannot be used, log `consequence` with the reason, and continue after the block."""
    client = connect(redis_url)
    try:
        with tolerated(log, consequence):
            yield client
    finally:
        await client.aclose()


async def check_redis(redis_url: str) -> None:
    """Return when Redis has answered.

    Raises: ConfigError with one sentence, within about 5 s, if Redis does not answer.
    """
    client = connect(redis_url)
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_S):
            # A read with a key: a server that is part of a Redis Cluster answers it with a redirect.
            await client.get("kvrelay:{check}")
    except TimeoutError:
        raise ConfigError(f"cannot reach Redis at {without_password(redis_url)}: no answer") from None
    except UNREACHABLE as error:
        raise ConfigError(f"cannot reach Redis at {without_password(redis_url)}: {short(error)}") from error
    except TypeError as error:  # the library checks the options of a URL when it first connects
        raise _malformed(redis_url, _complaint(redis_url, error)) from None
    finally:
        await client.aclose()


def honour_cancellation() -> None:
    """Raise a cancellation that the Redis client swallowed.

    The client waits with `asyncio.wait_for`. Before Python 3.12 this may lose a cancellation that arrives just as the
    wait ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def short(error: BaseException) -> str:
    """Describe a Redis error in a few words."""
    if isinstance(error, MovedError):
        return "it is part of a Redis Cluster: write redis+cluster:// instead of redis://"
    if isinstance(error, MasterNotFoundError):
        return _no_master(str(error))
    if re.search("HELLO must be called with the client already authenticated|Authentication required", str(error)):
        return "it needs a password"
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLError):
        return str(cause)
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    # Redis appends the number and line of our script that it refused to run.
    return re.sub(r"\. script: .*", "", str(error)).rstrip(".") or type(error).__name__


def _no_master(text: str) -> str:
    """Shorten the client's message, which describes its connection to each Sentinel over several hundred characters."""
    what, _, reasons = text.rstrip(".").partition(" : ")
    if "AuthenticationError" in reasons:
        return f"{what}: a Sentinel needs a password of its own, in the URL's option sentinel_password"
    return f"{what}: a Sentinel does not answer" if reasons else what

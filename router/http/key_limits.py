"""API keys, their classes and what each may use. Pure, except that the file of keys is read again when it changes.

[classes.batch]
requests_per_minute = 600
tokens_per_minute = 100000
concurrency = 8
highest_priority = 10

[keys]
"sk-a-secret" = "batch"
"sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae" = "default"
"""

from __future__ import annotations

import hashlib
import logging
import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError, RateLimited
from common.base.sentences import counted
from router.http.openai.shared_fields import MAX_PRIORITY
from router.http.response_headers import RawHeaders

log = logging.getLogger(__name__)

_CHECK_S = 1.0
"""Seconds between two checks whether the file has changed."""
_MAX_LIMIT = 10**15
_HASHED = "sha256:"
_HEADER = "x-ratelimit-{}-{}"
LIMIT_HEADERS = tuple(
    _HEADER.format(name, unit) for name in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)
"""All headers of `KeyUse.headers`."""


@dataclass(frozen=True)
class KeyClass:
    """Limits of each key of a class; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Tokens of prompts and answers together."""
    concurrency: int = 0
    """Requests at a time."""
    highest_priority: int = 0
    """The lowest number that a request's `priority` may have."""


DEFAULT_CLASS = KeyClass()


class _Bucket:
    """`per_minute` tokens that come back evenly. What is taken may be more than there is: then others wait."""

    def __init__(self, per_minute: int, now_s: float, left: float = 1.0) -> None:
        """left: the share of `per_minute` that the bucket begins with."""
        self.per_minute = per_minute
        self._level = left * per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._level

    def take(self, count: int) -> None:
        self._level -= count

    def wait_s(self, needed: int) -> float:
        return max(0.0, (needed - self._level) * 60 / self.per_minute)


class KeyUse:
    """What one key uses now."""

    def __init__(self, digest: str, key_class: KeyClass, clock: Clock = monotonic) -> None:
        self.name = digest[:12]
        self._clock = clock
        self._in_flight = 0
        self._buckets: dict[str, _Bucket] = {}
        self.change(key_class)

    def change(self, key_class: KeyClass) -> None:
        """Replace the limits. The same share of each is left, so that the key waits as long as before."""
        now = self._clock()
        left = {unit: bucket.level(now) / bucket.per_minute for unit, bucket in self._buckets.items()}
        limits = {"requests": key_class.requests_per_minute, "tokens": key_class.tokens_per_minute}
        self.key_class = key_class
        self._buckets = {unit: _Bucket(limit, now, left.get(unit, 1.0)) for unit, limit in limits.items() if limit}

    @property
    def is_limited(self) -> bool:
        return bool(self._buckets or self.key_class.concurrency)

    def begin(self) -> None:
        """Count a request. Raises: RateLimited, which counts nothing."""
        limit, now = self.key_class.concurrency, self._clock()
        if limit and self._in_flight >= limit:
            raise RateLimited(
                f"this key has {counted(limit, 'request')} running, which is its limit", retry_after_s=1.0
            )
        for unit, bucket in self._buckets.items():
            if bucket.level(now) < 1:
                raise RateLimited(
                    f"this key has used its {counted(bucket.per_minute, unit.removesuffix('s'))} a minute",
                    retry_after_s=math.ceil(bucket.wait_s(1)),
                )
        self._in_flight += 1
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def end(self, tokens: int) -> None:
        """The request is over and used this many tokens."""
        self._in_flight -= 1
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def headers(self) -> RawHeaders:
        """The rate limits, as OpenAI's API names them."""
        now, found = self._clock(), RawHeaders()
        for unit, bucket in self._buckets.items():
            left = bucket.level(now)
            shown = (("limit", bucket.per_minute), ("remaining", max(0, int(left))))
            found += [(_HEADER.format(name, unit).encode(), b"%d" % value) for name, value in shown]
            found.append((_HEADER.format("reset", unit).encode(), b"%ds" % math.ceil(bucket.wait_s(bucket.per_minute))))
        return found


class ApiKeys:
    """The keys that are valid now. Only their SHA-256 digests are kept, by which they are found: how long a look-up takes
    says nothing about a key.
    """

    def __init__(self, keys: tuple[str, ...] = (), file: Path | None = None, clock: Clock = monotonic) -> None:
        """keys: of the class `default`. Raises: ConfigError for a file that cannot be used."""
        self._clock = clock
        self._given = {digest_of(key): KeyUse(digest_of(key), DEFAULT_CLASS, clock) for key in keys}
        self._file = file
        self._stamp: tuple[int, ...] | None = None
        self._complaint = ""
        """Why the file could not be used when it was last read."""
        self._checked_s = clock()
        self._known = dict(self._given)
        if file is not None:
            self._stamp = _stamp(file)
            self._take(read_keys(file))

    def __bool__(self) -> bool:
        return bool(self._given) or self._file is not None

    def find(self, key: bytes) -> KeyUse | None:
        """The use of a valid key; None for all others."""
        if self._file is not None and self._clock() > self._checked_s + _CHECK_S:
            self._checked_s = self._clock()
            self._reload(self._file)
        return self._known.get(digest_of(key))

    def _reload(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys(file))
            self._complaint = ""
            log.info("%s: %d API keys", file, len(self._known))
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):  # which may end without a change of the file
                self._stamp = None
            if str(error) != self._complaint:
                log.error("%s; the keys from before stay valid", error)
            self._complaint = str(error)

    def _take(self, classes: dict[str, KeyClass]) -> None:
        """Replace the keys. Those that stay keep their use, also if their class has other limits now."""
        known = dict(self._given)
        for digest, key_class in classes.items():
            use = self._known.get(digest)
            if use is None or use is self._given.get(digest):  # a given key whose line is removed has no limits again
                use = KeyUse(digest, key_class, self._clock)
            elif use.key_class != key_class:
                use.change(key_class)
            known[digest] = use
        self._known = known


def digest_of(key: str | bytes) -> str:
    """SHA-256 in hexadecimal, of UTF-8 or of what a header holds."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Changes with the file. Its times alone may not: those of a half-written file may be those of the whole one."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(file: Path) -> dict[str, KeyClass]:
    """The class of each key, by its digest. Raises: ConfigError, which never quotes a key."""
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {file}: {error.strerror}") from error
    except ValueError:  # the parser's message may quote a key
        raise ConfigError(f"the file of API keys {file} is no valid TOML") from None
    unknown = sorted(content.keys() - {"classes", "keys"})
    if unknown or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(
            f"{file}: it may only hold the tables classes and keys{', not ' + unknown[0] if unknown else ''}"
        )
    classes = {"default": DEFAULT_CLASS}
    for name, limits in content.get("classes", {}).items():
        classes[name] = _key_class(file, name, limits)
    found: dict[str, KeyClass] = {}
    for number, (key, name) in enumerate(content.get("keys", {}).items(), 1):
        if not isinstance(name, str) or name not in classes:
            # Key and class may be swapped, so neither is echoed.
            defined = ", ".join(sorted(classes))
            raise ConfigError(f"{file}: key {number} has a class that is not defined; defined are: {defined}")
        digest = key.removeprefix(_HASHED).lower() if key.startswith(_HASHED) else digest_of(key)
        if key.startswith(_HASHED) and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
            raise ConfigError(f"{file}: key {number} is no SHA-256 digest in hexadecimal")
        if digest == digest_of(""):
            raise ConfigError(f"{file}: key {number} is empty, which is what clients without a key send")
        found[digest] = classes[name]
    return found


def _key_class(file: Path, name: str, limits: object) -> KeyClass:
    known = {field.name for field in fields(KeyClass)}
    if not isinstance(limits, dict):
        raise ConfigError(f"{file}: class {name!r} is no table")
    given = cast("dict[str, Any]", limits)
    for field, value in given.items():
        if field not in known:
            raise ConfigError(f"{file}: class {name!r} has {field!r}; known: {', '.join(sorted(known))}")
        low, high = (-MAX_PRIORITY, MAX_PRIORITY) if field == "highest_priority" else (0, _MAX_LIMIT)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{file}: {field} of class {name!r} must be a whole number from {low} to {high}")
    return KeyClass(**given)

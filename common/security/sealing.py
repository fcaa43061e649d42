"""Authenticated encryption (AEGIS-128L) of messages to a server whose key is told only over mutually authenticated links.

A server has an X25519 key that is new in each process. Its public half never travels in clear: a client that knows it is
allowed in. A client makes an X25519 key for each connection and sends its public half in clear. Both derive one key for each
direction from the shared secret and both public halves (HKDF-SHA256). Needs the packages `cryptography` and `pynacl`.

A sealed frame is ciphertext, tag and nonce. The nonces of a direction only ever grow, also if the server forgets a channel
and derives it again: they start at the time. A frame is opened only if its nonce is above those opened before.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any

from common.base.errors import ConfigError, ProtocolError
from common.security.sealed_endpoints import NONCE_BYTES, OVERHEAD_BYTES, TAG_BYTES

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from nacl import _sodium  # type: ignore[attr-defined]
    from nacl.bindings import crypto_aead_aegis128l_KEYBYTES as _CIPHER_KEY_BYTES
    from nacl.bindings import sodium_init
except ImportError as error:
    raise ConfigError("--tls-dir needs `cryptography` and `pynacl`: pip install 'kvrelay[tls]'") from error

sodium_init()
_ffi: Any = _sodium.ffi
_lib: Any = _sodium.lib
"""What `nacl.bindings` calls; its own functions copy each message twice."""
_COUNTER_BITS = 32
"""The part of a nonce that counts; before it is the time, in nanoseconds, at which the channel was made."""
_PURPOSE, _PASSWORD = b"kvrelay sealed channel 1", b"kvrelay password 1"


class Channel:
    """One end of a connection: seals what it sends, opens what it receives. Used by one thread.

    `data`, `frame`, `out`: contiguous buffers of bytes. `context` is authenticated with a frame and not part of it.
    """

    def __init__(self, seals_with: bytes, opens_with: bytes) -> None:
        self._seals_with, self._opens_with = seals_with, opens_with
        self._next = time.monotonic_ns() << _COUNTER_BITS
        self._newest = bytes(NONCE_BYTES)

    def seal_into(self, data: Any, out: Any, context: bytes = b"") -> None:
        """Seal `data` into `out`, which is `OVERHEAD_BYTES` longer; in place where `data` is its beginning."""
        content, sealed = _ffi.from_buffer(data), _ffi.from_buffer(out, require_writable=True)
        if len(sealed) != len(content) + OVERHEAD_BYTES:
            raise ValueError(f"{len(content)} bytes are sealed into {len(sealed)}")
        nonce = self._next.to_bytes(NONCE_BYTES, "big")
        self._next += 1
        none, size = _ffi.NULL, len(content)
        _lib.crypto_aead_aegis128l_encrypt(
            sealed, none, content, size, context, len(context), none, nonce, self._seals_with
        )
        _ffi.memmove(sealed + size + TAG_BYTES, nonce, NONCE_BYTES)

    def seal(self, data: bytes) -> bytes:
        """`data` as a sealed frame."""
        out = bytearray(len(data) + OVERHEAD_BYTES)
        self.seal_into(data, out)
        return bytes(out)

    def open_into(self, frame: Any, out: Any, context: bytes = b"") -> None:
        """Open `frame` into `out`, which is `OVERHEAD_BYTES` shorter; in place where it is the beginning of `frame`. What is
        there after an error means nothing.

        Raises: ProtocolError unless the other end sealed it, with this context, after all frames opened before.
        """
        sealed, content = _ffi.from_buffer(frame), _ffi.from_buffer(out, require_writable=True)
        nonce = bytes(memoryview(frame)[-NONCE_BYTES:])
        if len(sealed) != len(content) + OVERHEAD_BYTES or nonce <= self._newest:
            raise ProtocolError("it came before, or is too short")
        none, size = _ffi.NULL, len(content) + TAG_BYTES
        if _lib.crypto_aead_aegis128l_decrypt(
            content, none, none, sealed, size, context, len(context), nonce, self._opens_with
        ):
            raise ProtocolError("it was not sealed for this connection")
        self._newest = nonce

    def open(self, frame: Any) -> memoryview:
        """The content of a sealed frame. Raises: see `open_into`."""
        out = memoryview(bytearray(max(0, len(frame) - OVERHEAD_BYTES)))
        self.open_into(frame, out)
        return out


class ServerKey:
    """A server's key; `public` is its public half."""

    def __init__(self, secret: bytes | None = None) -> None:
        """secret: 32 bytes that the key follows from. None: a new key."""
        self._private = X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def channel(self, client: bytes) -> Channel:
        """The server's end of the connection of the client with this public half. Raises: ProtocolError."""
        to_server, to_client = _keys(self._private, client, client, self.public)
        return Channel(to_client, to_server)


def client_channel(server: bytes) -> tuple[bytes, Channel]:
    """The public half of a new client's key, and the client's end of its connection to the server with this public half.

    Raises: ProtocolError if `server` is no public half of a key.
    """
    private = X25519PrivateKey.generate()
    client = private.public_key().public_bytes_raw()
    to_server, to_client = _keys(private, server, client, server)
    return client, Channel(to_server, to_client)


def password(server: bytes) -> bytes:
    """Proves that a client knows the public half `server` without telling it; hexadecimal digits."""
    return hmac.digest(server, _PASSWORD, hashlib.sha256).hex().encode()


def _keys(private: X25519PrivateKey, other: bytes, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ProtocolError(f"not a public key: {error}") from None
    keys = HKDF(SHA256(), 2 * _CIPHER_KEY_BYTES, salt=None, info=_PURPOSE + client + server).derive(shared)
    return keys[:_CIPHER_KEY_BYTES], keys[_CIPHER_KEY_BYTES:]

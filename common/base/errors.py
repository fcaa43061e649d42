"""All errors that kvrelay raises on purpose, in one tree.

    KvRelayError
    ├── ConfigError              configuration that cannot work (exit code 78)
    ├── ClientError              the client made a mistake
    │   ├── BadRequest           400
    │   │   ├── PromptTooLong    a prompt leaves no room for the answer
    │   │   └── NoTokenAllowed   a request's masks and bans exclude every token
    │   ├── Unauthorized         401
    │   ├── Forbidden            403
    │   ├── NotFound             404
    │   ├── RequestTimeout       408
    │   ├── PayloadTooLarge      413
    │   └── UnsupportedMediaType 415
    ├── Overloaded               429, try again after `retry_after_s`
    │   └── RateLimited          429, a limit of the client's API key
    ├── Unavailable              503, no node can serve this now; try again
    │   └── AdapterMissing       503, this node does not have the request's LoRA adapter; another one may
    ├── DeadlineExceeded         504
    ├── ProtocolError            a received message is malformed, too large or of another version
    ├── TransferError            a KV transfer failed; the attempt may be retried
    │   ├── HandshakeRefused     the two ends are incompatible (model, block size, dtype, version)
    │   ├── CorruptSlice         a slice contradicts its grant: hash, shape or position
    │   ├── TransferAborted      one end aborted the transfer on purpose
    │   ├── PeerLost             the other end is gone or restarted
    │   └── TransferTimedOut     504, the transfer's own deadline passed, not the request's
    ├── RestartRequested         an operator asked for a restart of this service (exit code 75)
    ├── RankLost                 a rank of this node is gone, silent or out of step: the node must end
    ├── EngineError              500, a step failed
    ├── NoFiniteLogits           500, for one sequence of a step
    └── InvalidTransition        a state machine met an event that its table does not have: a bug of ours

Third-party exceptions are mapped to these once, where they enter. `code` is the stable machine-readable name in
messages and in responses to clients.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Self


class KvRelayError(Exception):
    """Root of all kvrelay errors. Clients see `http_status` and `code`; the router retries if `retryable`."""

    http_status: int = 500
    code: str = "internal_error"
    retryable: bool = False
    exit_code: int = 1
    """Exit code of a command that ends with this error."""

    def __init_subclass__(cls, *, code: str = "", http_status: int = 0, retryable: bool | None = None) -> None:
        """Set what differs from the base class, and register the class as that of its `code` for `from_code`."""
        super().__init_subclass__()
        cls.http_status = http_status or cls.http_status
        cls.retryable = cls.retryable if retryable is None else retryable
        if code:
            cls.code = code
            _BY_CODE[code] = cls

    def __str__(self) -> str:
        """Return the message as one line, even if a library's error or a broken file put line ends into it."""
        return " ".join(super().__str__().splitlines())

    @property
    def message(self) -> str:
        return str(self)

    def after_attempts(self, count: int) -> Self:
        """Return this error; if there were several attempts, a copy whose message says how many."""
        if count <= 1:
            return self
        counted = copy.copy(self)  # others may refer to this one
        counted.args = (f"{self.message} (after {count} attempts)",)
        return counted


_BY_CODE: dict[str, type[KvRelayError]] = {KvRelayError.code: KvRelayError}


class ConfigError(KvRelayError, code="config_error"):
    """The configuration, the model folder or the environment cannot work as given."""

    exit_code = 78


class RestartRequested(KvRelayError, code="restart_requested"):
    """The service ends because an operator asked for a restart; the supervisor must restart it."""

    exit_code = 75


class ClientError(KvRelayError, code="invalid_request", http_status=400):
    """The request itself is wrong; `param` names the faulty field, if any."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(ClientError, code="invalid_request"):
    """A field of the request is malformed or out of range."""


class PromptTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt leaves no room for the answer. `tokens`: the prompt's length, a lower bound if it is very long; `limit`: the
    length of the longest prompt that can be answered."""

    def __init__(self, message: str, *, param: str | None = None, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class NoTokenAllowed(BadRequest, code="no_token_allowed"):
    """The request's own masks and bans leave no token that can be sampled next."""


class Unauthorized(ClientError, code="invalid_api_key", http_status=401):
    """The request has no API key, or a wrong one."""


class Forbidden(ClientError, code="forbidden", http_status=403):
    """This server does not allow the call."""


class NotFound(ClientError, code="not_found", http_status=404):
    """The model or path does not exist."""


class RequestTimeout(ClientError, code="request_timeout", http_status=408):
    """The request's body did not arrive in time."""


class PayloadTooLarge(ClientError, code="payload_too_large", http_status=413):
    """The body is larger than the server accepts."""


class UnsupportedMediaType(ClientError, code="unsupported_media_type", http_status=415):
    """The body is not JSON."""


class Overloaded(KvRelayError, code="overloaded", http_status=429, retryable=True):
    """A queue is full; nothing of the request was accepted."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The client's API key has reached a limit of its class."""


class Unavailable(KvRelayError, code="unavailable", http_status=503, retryable=True):
    """No live node can serve this now."""


class AdapterMissing(Unavailable, code="adapter_missing"):
    """This node does not have the LoRA adapter of the request, or has other weights under its name."""


class DeadlineExceeded(KvRelayError, code="deadline_exceeded", http_status=504):
    """The request's deadline passed."""


class ProtocolError(KvRelayError, code="protocol_error"):
    """A message is malformed, too large, of an unknown type or of another protocol version."""


class TransferError(KvRelayError, code="transfer_failed", http_status=503, retryable=True):
    """A KV transfer failed."""


class HandshakeRefused(TransferError, code="handshake_refused", retryable=False):
    """The two ends of a transfer differ in a way that makes their KV incompatible."""


class CorruptSlice(TransferError, code="corrupt_slice"):
    """A KV slice's block hash, shape or position contradicts its grant."""


class TransferAborted(TransferError, code="transfer_aborted"):
    """One end aborted the transfer on purpose."""


class PeerLost(TransferError, code="peer_lost"):
    """The other end of a link is gone, silent beyond its lease, or restarted as a new incarnation."""


class TransferTimedOut(TransferError, DeadlineExceeded, code="transfer_timed_out", http_status=504):
    """A transfer's deadline passed. The request may have time left for another attempt, so it is retryable."""


class RankLost(KvRelayError, code="rank_lost", http_status=503, retryable=True):
    """A rank of this node is gone, silent beyond its deadline or out of step; the node's ranks cannot continue."""


class EngineError(KvRelayError, code="engine_error", retryable=True):
    """A forward step raised an error: the requests of that step fail, and the engine continues."""


class NoFiniteLogits(KvRelayError, code="no_finite_logits"):
    """The model computed no finite logit, so no token can be sampled. Not retryable: any node would compute the same."""


class InvalidTransition(KvRelayError, code="invalid_transition"):
    """A state machine met an event that its table does not have: only tests raise it. The message has its story."""


def from_code(code: str, message: str) -> KvRelayError:
    """Return the error that another process reported as (code, message); an unknown code becomes `EngineError`."""
    return _BY_CODE.get(code, EngineError)(message)


@contextmanager
def as_config_error(what: str, most_chars: int | None = None) -> Generator[None]:
    """Turn any error of a library that reads a broken file (often a bare Exception) into a ConfigError.

    Raises: ConfigError with the text `what: reason`, where the reason has at most `most_chars` characters.
    """
    try:
        yield
    except BaseException as error:
        # A panic of a library in Rust, which pyo3 raises, is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {str(error)[:most_chars]}") from error

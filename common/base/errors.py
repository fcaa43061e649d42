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
    """Root. Clients see `http_status` and `code`; the router retries if `retryable`."""

    http_status: int = 500
    code: str = "internal_error"
    retryable: bool = False

    def __str__(self) -> str:
        """One line, whatever a library's error or a broken file put into it."""
        return " ".join(super().__str__().splitlines())

    @property
    def message(self) -> str:
        return str(self)

    def after_attempts(self, count: int) -> Self:
        """This error, telling how many attempts there were if there were several."""
        if count <= 1:
            return self
        told = copy.copy(self)  # others may hold this one
        told.args = (f"{self.message} (after {count} attempts)",)
        return told


class ConfigError(KvRelayError):
    """The configuration, the model folder or the environment cannot work as given."""

    code = "config_error"
    exit_code: int = 78


class RestartRequested(KvRelayError):
    """The service ends because an operator asked for a restart: whoever supervises it shall start it again."""

    code = "restart_requested"
    exit_code: int = 75


class ClientError(KvRelayError):
    """The request itself is wrong; `param` names the faulty field, if any."""

    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(ClientError):
    """Malformed or out of range."""


class PromptTooLong(BadRequest):
    """The prompt leaves no room for the answer. `tokens`: its length, of very long ones a lower bound; `limit`: that of the
    longest one that can be answered."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class NoTokenAllowed(BadRequest):
    """The request's own masks and bans leave no token that can be sampled next."""

    code = "no_token_allowed"


class Unauthorized(ClientError):
    """No key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class Forbidden(ClientError):
    """This server does not allow the call."""

    http_status = 403
    code = "forbidden"


class NotFound(ClientError):
    """No such model or path."""

    http_status = 404
    code = "not_found"


class RequestTimeout(ClientError):
    """The request's body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class PayloadTooLarge(ClientError):
    """The body is larger than the server accepts."""

    http_status = 413
    code = "payload_too_large"


class UnsupportedMediaType(ClientError):
    """The body is not JSON."""

    http_status = 415
    code = "unsupported_media_type"


class Overloaded(KvRelayError):
    """A queue bound was reached; nothing was accepted."""

    http_status = 429
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The client's API key has used what its class allows."""

    code = "rate_limit_exceeded"


class Unavailable(KvRelayError):
    """No live node can serve this now."""

    http_status = 503
    code = "unavailable"
    retryable = True


class AdapterMissing(Unavailable):
    """This node does not have the LoRA adapter of the request, or has other weights under its name."""

    code = "adapter_missing"


class DeadlineExceeded(KvRelayError):
    """The request's deadline passed."""

    http_status = 504
    code = "deadline_exceeded"


class ProtocolError(KvRelayError):
    """A message is malformed, too large, of an unknown type or of another protocol version."""

    code = "protocol_error"


class TransferError(KvRelayError):
    """A KV transfer failed."""

    http_status = 503
    code = "transfer_failed"
    retryable = True


class HandshakeRefused(TransferError):
    """The two ends of a transfer differ in a way that makes their KV incompatible."""

    code = "handshake_refused"
    retryable = False


class CorruptSlice(TransferError):
    """A slice's block hash, shape or position contradicts its grant."""

    code = "corrupt_slice"


class TransferAborted(TransferError):
    """One end aborted the transfer on purpose."""

    code = "transfer_aborted"


class PeerLost(TransferError):
    """The other end of a link is gone, silent beyond its lease, or restarted as a new incarnation."""

    code = "peer_lost"


class TransferTimedOut(TransferError, DeadlineExceeded):
    """A transfer's deadline passed. The request may have time left for another attempt, so it is retryable."""

    http_status = 504
    code = "transfer_timed_out"


class RankLost(KvRelayError):
    """A rank of this node is gone, silent beyond its deadline or out of step; the node's ranks cannot continue."""

    http_status = 503
    code = "rank_lost"
    retryable = True


class EngineError(KvRelayError):
    """A forward step raised; the requests of that step fail, the engine continues."""

    code = "engine_error"
    retryable = True


class NoFiniteLogits(KvRelayError):
    """The model computed no finite logit to draw a token from. Not retryable: any node would compute the same."""

    code = "no_finite_logits"


class InvalidTransition(KvRelayError):
    """A state machine met an event that its table does not have. The message has the story of what it happened to."""

    code = "invalid_transition"


_BY_CODE: dict[str, type[KvRelayError]] = {}


def _collect(cls: type[KvRelayError]) -> None:
    _BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _collect(sub)


_collect(KvRelayError)


def from_code(code: str, message: str) -> KvRelayError:
    """The error that another process reported as (code, message); an unknown code becomes `EngineError`."""
    return _BY_CODE.get(code, EngineError)(message)


def is_bug_of_library(error: BaseException) -> bool:
    """Whether a library written in Rust failed by itself; pyo3 raises that past `except Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def as_config_error(what: str, most_chars: int | None = None) -> Generator[None]:
    """Raises: ConfigError, `what` and a colon before at most `most_chars` of its reason, for all that a library raises of a
    broken file: often a bare Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_bug_of_library(error):
            raise
        raise ConfigError(f"{what}: {str(error)[:most_chars]}") from error

"""The requests of a router that have not ended. Router process, event loop."""

from __future__ import annotations

from typing import Generic, TypeVar

_Request = TypeVar("_Request")


class RequestTable(Generic[_Request]):
    """Requests by id, and which of them have no token yet."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def waiting(self) -> int:
        """Requests without a token."""
        return len(self._waiting)

    def add(self, request_id: str, request: _Request) -> None:
        """A request was accepted."""
        self._requests[request_id] = request
        self._waiting.add(request_id)

    def first_token(self, request_id: str) -> None:
        """The request got its first token and no longer counts as waiting."""
        self._waiting.discard(request_id)

    def remove(self, request_id: str) -> None:
        """The request is over; one that is not here is ignored."""
        self._waiting.discard(request_id)
        self._requests.pop(request_id, None)

    def get(self, request_id: str) -> _Request | None:
        """The request with this id, if it has not ended."""
        return self._requests.get(request_id)

    def all(self) -> list[_Request]:
        """A copy of the list of all requests: requests may end while it is iterated."""
        return list(self._requests.values())

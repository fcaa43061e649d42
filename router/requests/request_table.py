"""The requests for one model that have no token yet, in the table of the router's requests for all models. Event loop."""

from __future__ import annotations

from typing import Generic, TypeVar

_Request = TypeVar("_Request")


class RequestTable(Generic[_Request]):
    """Adds requests to that table, and knows which of its own wait."""

    def __init__(self, requests: dict[str, _Request]) -> None:
        """`requests`: the router's requests for all models."""
        self._requests = requests
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        """The number of the router's requests for all models: the other registries count these, too."""
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

"""Loads and unloads LoRA adapters at all nodes of a model, through their admin ports. Runs on the router's event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from common.base.errors import BadRequest, Forbidden, KvRelayError, NotFound, Unavailable
from common.base.sentences import counted
from common.control.messages import NodeRecord
from router.admin_http import admin_address, admin_http
from router.models.catalog import ModelCatalog
from router.nodes.node_table import NodeTable

log = logging.getLogger(__name__)

_NODE_TIMEOUT_S = 90.0
"""Time for a node's answer, which comes when its ranks have the adapter; the node's own limit is shorter."""
_REGISTERED_TIMEOUT_S = 10.0
_POLL_S = 0.05


class AdapterControl:
    """Implements `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    def __init__(
        self, nodes: NodeTable, catalog: ModelCatalog, *, folder: str | None, admin_token: str, tls_dir: str | None
    ) -> None:
        """`folder`: the folder of all adapters that clients may load, as the nodes see it; None: they may load none."""
        self._nodes = nodes
        self._catalog = catalog
        self._folder = folder
        self._admin_token = admin_token
        self._tls_dir = tls_dir
        self._lock = asyncio.Lock()

    async def load(self, name: str, path: str, base: str | None, owner: str) -> None:
        """Load an adapter of the client `owner` at all nodes of the model `base`; returns when requests can name it.

        `base` None: the default model. Raises: Forbidden, NotFound; BadRequest if a node cannot use it, Unavailable if one does
        not answer; then the other nodes may have it.
        """
        folder = self._allowed_folder()
        known = next((model for model in self._catalog.models if model.name == name and model.adapter is None), None)
        if known is not None:
            raise BadRequest(f"{name!r} is the name of a model", param="lora_name")
        model = self._catalog.get(base)
        if model.adapter is not None or model.task != "generate":
            raise BadRequest(f"{model.name!r} is no model that takes adapters", param="base_model_name")
        async with self._lock:
            records = self._records(model.base)
            answers = await self._ask_all(
                records, "/lora/load", {"name": name, "path": path, "below": folder, "owner": owner}
            )
            digests = {str(answer["digest"]) for answer in answers}
            if len(digests) > 1:
                raise BadRequest(f"{path} holds other weights at some nodes than at others", param="lora_path")
            await self._until_registered(records, name, digests)

    async def unload(self, name: str, owner: str) -> None:
        """Unload an adapter from all nodes that have it, if the client `owner` has loaded it; requests that run finish with it.

        Raises: what `load` raises.
        """
        self._allowed_folder()
        async with self._lock:
            records = [
                record
                for record in (node.record for node in self._nodes.known() if node.listed)
                if any(adapter.name == name for adapter in record.adapters)
            ]
            if not records:
                raise NotFound(f"no LoRA adapter is named {name!r}", param="lora_name", code="model_not_found")
            await self._ask_all(records, "/lora/unload", {"name": name, "owner": owner})
            await self._until_registered(records, name, set())

    def _allowed_folder(self) -> str:
        if self._folder is None:
            raise Forbidden(
                "adapters are not loaded or unloaded through the API: start the router with --allow-runtime-lora, or use "
                "kvrelay admin lora"
            )
        return self._folder

    def _records(self, model: str) -> list[NodeRecord]:
        records = [node.record for node in self._nodes.known() if node.listed and node.record.model.name == model]
        if not records:
            raise Unavailable(f"no node of {model} is available now; try again")
        return records

    async def _ask_all(self, records: list[NodeRecord], path: str, body: dict[str, str]) -> list[dict[str, Any]]:
        async with admin_http(self._admin_token, _NODE_TIMEOUT_S, self._tls_dir) as http:
            asked = [self._ask(http, record, path, body) for record in records]
            answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [
            (record.peer.node_id, answer)
            for record, answer in zip(records, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        if failed:
            done = len(records) - len(failed)
            why = "; ".join(f"{node}: {error}" for node, error in failed)
            kinds = {type(error) for _, error in failed}
            kind = kinds.pop() if kinds in ({BadRequest}, {Forbidden}) else Unavailable
            raise kind(f"{done} of {counted(len(records), 'node')} did it; {why}")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    @staticmethod
    async def _ask(http: httpx.AsyncClient, record: NodeRecord, path: str, body: dict[str, str]) -> dict[str, Any]:
        """Raises: BadRequest or Forbidden if the node refuses, Unavailable if it does not answer."""
        address = await admin_address(record)
        try:
            answer = await http.post(address + path, json=body)
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"no answer from its admin port: {error or type(error).__name__}") from None
        if answer.status_code == 200:
            return found
        message = str(found.get("error", {}).get("message", answer.status_code))
        kinds: dict[int, type[KvRelayError]] = {400: BadRequest, 404: BadRequest, 403: Forbidden}
        raise kinds.get(answer.status_code, Unavailable)(message)

    async def _until_registered(self, records: list[NodeRecord], name: str, digests: set[str]) -> None:
        """Wait until all these nodes that are still there have registered the adapter with a digest of these, or none."""
        incarnations = [record.peer.incarnation for record in records]
        try:
            async with asyncio.timeout(_REGISTERED_TIMEOUT_S):
                while any(self._digests(incarnation, name) not in (digests, None) for incarnation in incarnations):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(
                "the nodes did it, but have not registered it in Redis yet; it will be seen later"
            ) from None

    def _digests(self, incarnation: str, name: str) -> set[str] | None:
        node = self._nodes.get(incarnation)
        if node is None or not node.listed:
            return None
        return {adapter.digest for adapter in node.record.adapters if adapter.name == name}

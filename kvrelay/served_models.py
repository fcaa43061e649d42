"""Which server of the OpenAI API the command line asks by default, and what it serves."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any

from common.base.errors import ConfigError
from common.cluster.running_clusters import running_clusters, runtime_folder
from kvrelay.admin.client import AdminUnreachable

_TIMEOUT_S = 10.0


def default_url() -> str:
    """The URL of this user's only `kvrelay up`, else port 8000 on this host."""
    clusters = running_clusters(runtime_folder(os.environ))
    return clusters[0].url if len(clusters) == 1 else "http://127.0.0.1:8000"


def base_url(url: str) -> str:
    """The URL of a server, which users may give with the /v1 of OpenAI's clients."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str) -> dict[bytes, bytes]:
    """The header with this key, as the router expects it; none without a key.

    Raises: ConfigError for a key that no header can have, such as one read from a file with its line end.
    """
    if not api_key.isprintable():
        raise ConfigError("the API key contains a line end or another control character, or is not UTF-8")
    return {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}


def list_models(url: str, api_key: str) -> dict[str, dict[str, Any]]:
    """The models that the server lists, by id; at least one.

    Raises: AdminUnreachable (exit code 3) if it lists none; ConfigError.
    """
    headers: dict[str, Any] = {name.decode(): value for name, value in authorization(api_key).items()}
    where = url.rstrip("/") + "/v1/models"
    try:
        request = urllib.request.Request(where, headers=headers)  # noqa: S310 - the user's own argument
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            models = {model["id"]: model for model in json.loads(answer.read())["data"]}
    except urllib.error.HTTPError as error:
        with error:
            why = "is this a server of the OpenAI API?"
            if error.code == HTTPStatus.UNAUTHORIZED:
                why = "it refuses the API key, which --api-key or KVRELAY_API_KEY gives"
            raise AdminUnreachable(f"{where} answers {error.code}: {why}") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise AdminUnreachable(f"{where} does not list models: {getattr(error, 'reason', error)}") from None
    if not models:
        raise AdminUnreachable(f"{where} lists no model: nothing is served there yet")
    return models

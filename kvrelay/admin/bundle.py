"""`kvrelay admin support-bundle`: one file with everything that helps to find a fault, without prompts and secrets."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from common.base.files import write_whole
from kvrelay.admin.check import examine, own_version
from kvrelay.admin.client import AdminRefused, AdminUnreachable, connect, router_urls
from kvrelay.admin.options import Url, check_output, file_name
from router.findings import find

_REQUESTS = 200


def support_bundle(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default kvrelay-support-TIME.tar.gz.")
    ] = None,
    url: Url = None,
) -> None:
    """Write one file for a bug report: states, options, findings, latest log lines, summaries of the latest requests.

    It has no prompts, no answers, no keys, tokens or passwords.
    """
    file = output or Path(f"kvrelay-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    check_output(file)
    parts = collect(url)
    archived = io.BytesIO()
    with tarfile.open(fileobj=archived, mode="w:gz") as archive:
        for name, content in parts.items():
            data = json.dumps(content, indent=1, default=str).encode()
            entry = tarfile.TarInfo(f"kvrelay-support/{name}.json")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    write_whole(file, archived.getvalue())
    print(f"{file}: {len(parts)} files; look through it before you send it")


def collect(url: str | None) -> dict[str, Any]:
    """The bundle's files by name. For a question without an answer the file holds the reason. Raises: what `examine` raises."""
    client = connect(url, os.environ)
    routers, nodes = examine(url)
    parts: dict[str, Any] = {
        "check": {
            "version": own_version(),
            "findings": [each._asdict() for each in find(routers, nodes, own_version())],
        }
    }
    urls, _ = router_urls(url, os.environ)
    places = [*zip(routers, urls, strict=True), *((node, str(node.known.get("admin_address", ""))) for node in nodes)]
    for service, base in places:
        name = file_name(service.name)
        parts[f"{name}/status"] = {"known": service.known, "status": service.status, "facts": service.facts}
        if service.silent:
            parts[f"{name}/silent"] = service.silent
            continue
        for path in ("/config", "/logs", *([f"/requests?limit={_REQUESTS}"] * (service.role == "router"))):
            try:
                answer = client.get(path, base=base, timeout_s=10.0)
            except (AdminUnreachable, AdminRefused) as error:
                answer = error.message
            parts[name + path.partition("?")[0]] = answer
    return parts

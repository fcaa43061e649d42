"""`kvrelay admin experts`: how the experts of mixtures are loaded and placed on nodes' ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvrelay.admin.client import AdminClient, AdminIncomplete, AdminRefused, AdminUnreachable
from kvrelay.admin.options import Json, Url, check_text, show_answer


def experts(
    node: Annotated[
        str | None, typer.Argument(metavar="[ID]", callback=check_text, help="Node id; by default all nodes.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show the experts on each rank of nodes with --rebalance-experts: their load since they last moved, the slots, the last plans."""

    def fetch(client: AdminClient) -> dict[str, Any]:
        known = [client.node(node)] if node else client.get("/nodes")["nodes"]
        answers: dict[str, Any] = {}
        failed: list[AdminRefused | AdminUnreachable] = []
        for each in known:
            try:
                answers[each["node_id"]] = client.get("/experts", base=client.address_of(each))
            except (AdminRefused, AdminUnreachable) as error:
                answers[each["node_id"]] = {"error": error.message}
                failed.append(error)
        if failed:
            raise AdminIncomplete("; ".join(error.message for error in failed), answers, failed[0].exit_code)
        return answers

    show_answer(url, as_json, fetch, lambda show, answer: show.Group(*(_node(show, *each) for each in answer.items())))


def _node(show: Any, name: str, says: Mapping[str, Any]) -> Any:
    if "error" in says:
        return show.cell(f"{name}: {says['error']}")
    if says["threshold"] is None:
        return show.cell(f"{name}: experts do not move (--rebalance-experts)")
    layers = [
        {
            "layer": layer["layer"],
            "load max over mean": layer["max_over_mean"],
            "rows of each rank": layer["loads"],
            "experts of each rank": "; ".join(" ".join(map(str, experts)) for experts in layer["slots"]),
        }
        for layer in says["layers"]
    ]
    plans = [
        {"planned": show.ago(time.time() - plan["at"]), "slots that change": plan["moved"], "reason": plan["reason"]}
        for plan in says["plans"]
    ]
    pending = f", {says['pending']} layers of the last plan still to come" if says["pending"] else ""
    title = f"{name}: threshold {says['threshold']:g}, {says['redundant']} redundant slots{pending}"
    return show.Group(show.records(title, layers), show.records("plans", plans))

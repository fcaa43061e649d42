// The latest requests, and the waterfall of one.

import { h, keyed, text } from "./dom.js";
import { frame, poll } from "./frame.js";
import { ago, bytes, count, duration } from "./units.js";
import { Waterfall } from "./waterfall.js";

const LISTED = 50;

frame("requests");
const main = document.getElementById("main");
const wanted = new URLSearchParams(location.search).get("id");
if (wanted) showOne(wanted);
else showList();

function showList() {
  const columns = ["Request", "Arrived", "Outcome", "Took", "Attempts", "Nodes", "Prompt", "Cached", "Answer", "Relayed"];
  const numbers = new Set(["Took", "Attempts", "Prompt", "Cached", "Answer", "Relayed"]);
  const rows = h("tbody");
  const none = h("p", { class: "dim", hidden: true }, "No request yet.");
  main.append(none, h("div", { class: "scroll" }, h("table", { "aria-label": "Requests" },
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", { class: numbers.has(name) ? "num" : null }, name)))), rows)));

  const make = (request) => h("tr", {},
    h("td", {}, h("a", { class: "mono", href: `?id=${encodeURIComponent(request.request_id)}` }, request.request_id)),
    columns.slice(1).map((name) => h("td", { class: numbers.has(name) ? "num" : null })));
  const update = (row, request) => {
    const { usage } = request;
    const shown = [ago(request.arrived_at), request.outcome, duration(request.duration_s), request.attempts, nodesOf(request.last_decision),
      usage ? count(usage.prompt_tokens) : "–", usage ? count(usage.cached_tokens) : "–", usage ? count(usage.completion_tokens) : "–",
      usage?.relayed_bytes ? bytes(usage.relayed_bytes) : "–"];
    shown.forEach((value, at) => text(row.children[at + 1], value));
    row.children[2].className = { failed: "bad", cancelled: "warn" }[request.outcome] ?? "";
    row.children[4].classList.toggle("warn", request.attempts > 1);
  };
  poll(() => `requests?limit=${LISTED}`, ({ requests }) => {
    none.hidden = requests.length > 0;
    keyed(rows, requests, (request) => request.request_id, make, update);
  });
}

/** The nodes of a decision, as text. */
export function nodesOf(decision) {
  if (!decision) return "–";
  const name = (leg) => leg?.node ?? leg?.node_id ?? "";
  return [name(decision.prefill), name(decision.decode)].filter(Boolean).join(" → ");
}

function showOne(id) {
  const title = main.querySelector("h1");
  title.replaceChildren(h("a", { href: "requests.html" }, "Requests"), " / ", h("span", { class: "mono" }, id));
  const place = h("div");
  main.append(place);
  let charts = [];
  poll(() => `requests/${encodeURIComponent(id)}`, (story) => {
    const stories = story.choices ?? [story];
    if (charts.length !== stories.length) {
      charts = stories.map(() => new Waterfall());
      place.replaceChildren(...charts.map((chart) => chart.element));
    }
    stories.forEach((each, at) => charts[at].show(each));
  });
}

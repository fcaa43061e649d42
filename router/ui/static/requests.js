// The latest requests, and the waterfall of one.

import { h, keyed, text } from "./dom.js";
import { frame, poll } from "./frame.js";
import { ago, bytes, count, duration, moment } from "./units.js";
import { Waterfall } from "./waterfall.js";

const LISTED = 200;
const OUTCOMES = ["all", "running", "finished", "failed", "cancelled"];

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
  const words = h("input", { type: "search", "aria-label": "Search", placeholder: "Request, node, outcome", oninput: () => draw() });
  const outcome = h("select", { "aria-label": "Outcome", onchange: () => draw() }, OUTCOMES.map((name) => h("option", {}, name)));
  let latest = [];
  main.append(h("p", { class: "buttons filter" }, words, outcome), none, h("div", { class: "scroll" }, h("table", { "aria-label": "Requests" },
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
    row.children[1].title = moment(request.arrived_at);
    row.children[2].className = { failed: "bad", cancelled: "warn" }[request.outcome] ?? "";
    row.children[4].classList.toggle("warn", request.attempts > 1);
  };
  const matches = (request) => {
    const about = [request.request_id, request.outcome, nodesOf(request.last_decision), request.model ?? ""].join(" ").toLowerCase();
    const asked = words.value.toLowerCase().split(/\s+/);
    return (outcome.value === "all" || request.outcome === outcome.value) && asked.every((word) => about.includes(word));
  };
  const draw = () => {
    const shown = latest.filter(matches);
    none.hidden = shown.length > 0;
    text(none, latest.length ? "No request matches." : "No request yet.");
    keyed(rows, shown, (request) => request.request_id, make, update);
  };
  poll(() => `requests?limit=${LISTED}`, ({ requests }) => {
    latest = requests;
    draw();
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
  let choices = [];
  poll(() => `requests/${encodeURIComponent(id)}`, (story) => {
    const stories = story.choices ?? [story];
    if (charts.length !== stories.length) {
      charts = stories.map(() => new Waterfall());
      choices = stories.map(() => h("section", { class: "panel why", "aria-label": "Why these nodes" }));
      place.replaceChildren(...charts.flatMap((chart, at) => [chart.element, choices[at]]));
    }
    stories.forEach((each, at) => {
      charts[at].show(each);
      showChoice(choices[at], each);
    });
  });
}

/** Why each attempt got its nodes: the reason, and the scores of the candidates. */
function showChoice(parent, story) {
  const decisions = story.events.filter((event) => event.event === "decision");
  const made = [h("h2", {}, "Why these nodes"), h("p", { class: "dim" }, `Arrived ${moment(story.arrived_at)}.`)];
  decisions.forEach(({ data }, at) => {
    made.push(h("p", {}, decisions.length > 1 ? `Attempt ${at + 1}: ` : "", `${nodesOf(data)} by ${data.policy}, ${data.mode}: ${data.reason}.`));
    for (const role of ["prefill", "decode"]) {
      const scores = Object.entries(data[role]?.scores ?? {}).sort(([, a], [, b]) => a - b);
      if (scores.length < 2) continue;
      made.push(h("table", { "aria-label": `Scores, ${role}` }, h("tbody", {}, scores.map(([node, score]) =>
        h("tr", {}, h("td", {}, node === data[role].node ? h("strong", {}, `${node}, chosen`) : node), h("td", { class: "num" }, Number(score).toPrecision(4)))))));
    }
  });
  const drawn = JSON.stringify(decisions);
  if (parent.drawn === drawn) return;
  parent.drawn = drawn;
  parent.replaceChildren(...made);
}

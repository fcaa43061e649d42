// The cluster: its nodes, their load, and the relays between them.

import { h, keyed, s, text } from "./dom.js";
import { frame, poll } from "./frame.js";
import { openNode, showNodes } from "./node.js";
import { overview } from "./overview.js";
import { count, counted, moment, percent, perSecond } from "./units.js";

const MOST_ARROWS = 64;
const MANY_NODES = 16;

frame("cluster");
const main = document.getElementById("main");
const notice = h("p", { class: "notice", role: "alert", hidden: true });
const figures = h("dl", { class: "figures" });
const prefill = h("ul", { class: "nodes", "aria-label": "Prefill nodes" });
const decode = h("ul", { class: "nodes", "aria-label": "Decode nodes" });
const arrows = s("svg", { class: "arrows", "aria-hidden": "true" });
const relays = h("tbody");
const plan = h("p", { class: "dim", "aria-label": "Plan", hidden: true });
const none = h("p", { class: "dim", hidden: true }, "No node is listed yet. Nodes appear here as soon as they register in Redis.");
const operator = overview();
main.append(
  notice, operator.element, h("h2", {}, "Now"), figures, plan, none,
  h("div", { class: "topology" },
    h("section", {}, h("h2", { class: "prefill" }, "Prefill"), prefill),
    arrows,
    h("section", {}, h("h2", { class: "decode" }, "Decode"), decode)),
  h("section", { class: "relays" },
    h("h2", {}, "Relays"),
    h("div", { class: "scroll" }, h("table", { "aria-label": "Relays" },
      h("thead", {}, h("tr", {}, h("th", {}, "From"), h("th", {}, "To"), h("th", { class: "num" }, "Now"), h("th", { class: "num" }, "Total"))),
      relays))),
);
let latest = null;
let drawn = "";

function figure(name, value, note) {
  return { name, value, note };
}

function showFigures(state) {
  const tokens = state.nodes.reduce((sum, node) => sum + node.queued_tokens, 0);
  const rate = state.relays.reduce((sum, relay) => sum + relay.per_s, 0);
  const shown = [
    figure("Running", count(state.running), `${count(state.waiting)} without a token yet`),
    figure("Held back", count(state.held), "until nodes have use for them"),
    figure("Prompt tokens queued", count(tokens), "at all nodes"),
    figure("Relaying", perSecond(rate), `${state.relays.filter((relay) => relay.per_s > 0).length} of ${state.relays.length} pairs`),
    figure("Policy", state.policy, state.models.join(", ") || "no model yet"),
  ];
  keyed(figures, shown, (item) => item.name,
    (item) => h("div", {}, h("dt", {}, item.name), h("dd", { class: "num" }), h("dd", { class: "dim" })),
    (element, item) => {
      text(element.children[1], item.value);
      text(element.children[2], item.note);
    });
}

function showPlan(state) {
  plan.hidden = !state;
  if (!state) return;
  const when = state.planned_at ? ` (${moment(state.planned_at)}, ${state.mode})` : "";
  text(plan, `Plan${when}: ${state.trouble || state.why}`);
}

function makeNode(node) {
  const meter = h("span", { class: "meter" }, h("i", { class: "used" }), h("i", { class: "cached" }));
  return h("li", {}, h("button", { class: `node ${node.role}`, type: "button", onclick: () => openNode(node.incarnation) },
    h("span", { class: "name" }), h("span", { class: "state" }),
    h("span", { class: "layout dim" }), h("span", { class: "load num" }),
    meter, h("span", { class: "kv dim num" })));
}

function updateNode(element, node) {
  const [name, state, layout, load, meter, kv] = element.firstChild.children;
  text(name, node.id);
  text(state, node.breaker === "closed" ? node.state : `${node.state}, breaker ${node.breaker}`);
  state.className = `state ${node.state === "usable" && node.breaker === "closed" ? "good" : node.draining ? "warn" : "bad"}`;
  text(layout, `${node.dp > 1 ? `DP ${node.dp}` : `TP ${node.tp}`} · PP ${node.pp} · ${counted(node.ranks, "rank")}`);
  const queued = node.queued_tokens ? ` · ${counted(node.queued_tokens, "token")}` : "";
  text(load, `${node.running} running · ${node.waiting} waiting${queued}`);
  meter.children[0].style.width = `${node.kv_total ? (100 * node.kv_used) / node.kv_total : 0}%`;
  meter.children[1].style.width = `${node.kv_total ? (100 * node.kv_cached) / node.kv_total : 0}%`;
  const lease = node.lease_late ? " · lease late" : "";
  text(kv, `KV ${percent(node.kv_used, node.kv_total)} used, ${percent(node.kv_cached, node.kv_total)} cached${lease}`);
}

function showRelays(state) {
  const names = new Map(state.nodes.map((node) => [node.incarnation, node.id]));
  const rows = [...state.relays].sort((a, b) => b.per_s - a.per_s || b.bytes - a.bytes).slice(0, MOST_ARROWS);
  keyed(relays, rows, (relay) => `${relay.src} ${relay.dst}`,
    (relay) => h("tr", {}, h("td", {}, names.get(relay.src)), h("td", {}, names.get(relay.dst)), h("td", { class: "num" }), h("td", { class: "num" })),
    (row, relay) => {
      text(row.children[2], relay.per_s ? perSecond(relay.per_s) : "–");
      text(row.children[3], perSecond(relay.bytes).replace("/s", ""));
    });
  if (!rows.length) keyed(relays, [{}], () => "none", () => h("tr", {}, h("td", { colspan: 4, class: "dim" }, "Nothing was relayed yet.")), () => {});
  return rows;
}

function drawArrows(rows) {
  const box = arrows.getBoundingClientRect();
  if (!box.width) return;
  const places = new Map();
  for (const [list, side] of [[prefill, 0], [decode, box.width]]) {
    for (const [incarnation, element] of list.keyed ?? []) {
      const at = element.getBoundingClientRect();
      places.set(incarnation, [side, at.top + at.height / 2 - box.top]);
    }
  }
  const most = Math.max(1, ...rows.map((relay) => relay.per_s));
  const used = rows.filter((relay) => places.has(relay.src) && places.has(relay.dst));
  const perSource = new Map();
  keyed(arrows, used, (relay) => `${relay.src} ${relay.dst}`,
    () => s("g", {}, s("path"), s("path", { class: "head" }), s("text", { "text-anchor": "middle" })),
    (group, relay) => {
      const [from, to] = [places.get(relay.src), places.get(relay.dst)];
      const [line, head, label] = group.children;
      const bend = box.width * 0.45;
      const order = perSource.get(relay.src) ?? 0;
      perSource.set(relay.src, order + 1);
      line.setAttribute("d", `M2 ${from[1]}C${bend} ${from[1]} ${to[0] - bend} ${to[1]} ${to[0] - 9} ${to[1]}`);
      line.setAttribute("stroke-width", relay.per_s ? 1 + (3 * relay.per_s) / most : 1);
      head.setAttribute("d", `M${to[0] - 9} ${to[1] - 4}l8 4l-8 4z`);
      group.setAttribute("class", relay.per_s ? "live" : "quiet");
      // Labels stand at different places of their curves, so that those of crossing curves do not collide.
      const part = order % 2 ? 0.72 : 0.28;
      const [x, y] = onCurve(part, [2, from[1]], [bend, from[1]], [to[0] - bend, to[1]], [to[0] - 9, to[1]]);
      label.setAttribute("x", x);
      label.setAttribute("y", y + 4);
      text(label, relay.per_s && used.length <= 12 ? perSecond(relay.per_s) : "");
    });
}

function onCurve(t, ...points) {
  const weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
  return [0, 1].map((axis) => points.reduce((sum, point, at) => sum + weights[at] * point[axis], 0));
}

function show(state) {
  latest = state;
  notice.hidden = state.redis === "ok";
  text(notice, state.redis === "ok" ? "" : `Redis: ${state.redis}`);
  none.hidden = state.nodes.length > 0;
  operator.show(state);
  showFigures(state);
  showPlan(state.plan);
  document.body.classList.toggle("dense", state.nodes.length > MANY_NODES);
  for (const [list, role] of [[prefill, "prefill"], [decode, "decode"]]) {
    keyed(list, state.nodes.filter((node) => node.role === role), (node) => node.incarnation, makeNode, updateNode);
  }
  const rows = showRelays(state);
  drawn = JSON.stringify(rows);
  drawArrows(rows);
  showNodes(state);
}

addEventListener("resize", () => latest && drawArrows(JSON.parse(drawn)));
poll(() => "snapshot", show);

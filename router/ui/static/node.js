// The dialog about one node: its figures, what it does now, draining.

import { askForToken, get, post, token } from "./api.js";
import { h, text } from "./dom.js";
import { bytes, count, counted, duration, percent } from "./units.js";

const REFRESH_MS = 2000;

const title = h("h2", { id: "node-title" });
const facts = h("dl", { class: "facts" });
const attempts = h("div");
const problem = h("p", { class: "bad", role: "alert" });
const drain = h("button", { type: "button", onclick: () => act("drain") }, "Drain");
const undrain = h("button", { type: "button", onclick: () => act("undrain") }, "Undrain");
const unlock = h("button", { type: "button", onclick: async () => (await askForToken()) && refresh() }, "Give the admin token");
const dialog = h("dialog", { class: "wide", "aria-labelledby": "node-title", onclose: () => clearTimeout(timer) },
  h("form", { method: "dialog", class: "head" }, title, h("button", { "aria-label": "Close" }, "Close")),
  facts, attempts, problem,
  h("p", { class: "buttons" }, drain, " ", undrain, " ", unlock),
  h("p", { class: "dim" }, "A draining node finishes its requests and gets no new ones."));
let shown = "";
let timer = 0;
document.body.append(dialog);

/** Open the dialog about the node with this incarnation. */
export function openNode(incarnation) {
  shown = incarnation;
  for (const part of [title, facts, attempts, problem]) part.replaceChildren();
  dialog.showModal();
  refresh();
}

/** Close the dialog if its node is gone. */
export function showNodes(state) {
  if (dialog.open && !state.nodes.some((node) => node.incarnation === shown)) {
    text(problem, "This node is gone.");
    drain.disabled = undrain.disabled = true;
  }
}

async function refresh() {
  clearTimeout(timer);
  const wanted = shown;
  try {
    const node = await get(`nodes/${encodeURIComponent(wanted)}`);
    if (dialog.open && wanted === shown) show(node);
  } catch (error) {
    text(problem, error.message);
  }
  if (dialog.open) timer = setTimeout(refresh, REFRESH_MS);
}

async function act(action) {
  drain.disabled = undrain.disabled = true;
  text(problem, "");
  try {
    await post(`nodes/${encodeURIComponent(shown)}/${action}`);
  } catch (error) {
    text(problem, error.message);
  }
  setTimeout(refresh, 300);
}

function show(node) {
  text(title, node.node_id);
  const { load, own } = node;
  const kv = (blocks) => `${counted(blocks, "block")} (${percent(blocks, load.kv_blocks_total)})`;
  const rows = [
    ["Role", `${node.role}, ${node.state}`],
    ["Model", node.model],
    ["Layout", `TP ${node.layout.tensor_parallel}, PP ${node.layout.pipeline_parallel}: ${node.layout.layers_per_stage.join(" + ")} layers`],
    ["Requests", `${load.running} running, ${load.waiting} waiting, ${counted(load.queued_tokens, "prompt token")} queued`],
    ["KV memory", `${kv(load.kv_blocks_used)} used, ${kv(load.kv_blocks_cached)} cached, of ${count(load.kv_blocks_total)}`],
    ["Prefix cache", `${percent(load.prefix_hits, load.prefix_queries)} of ${counted(load.prefix_queries, "token")} hit`],
    ["Decode step", load.step_s ? duration(load.step_s) : "–"],
    ...Object.entries(load.drafted).map(([method, drafted]) => [`Drafts (${method})`,
      `${percent(load.drafts_accepted[method], drafted)} of ${counted(drafted, "token")} right`]),
    ["Relayed", `${bytes(load.relayed_bytes)}${Object.keys(load.relayed_by).length ? ` over ${Object.keys(load.relayed_by).join(", ")}` : ""}`],
    ["Failures", `${counted(load.transfers_failed, "transfer")}, ${counted(load.preemptions, "preemption")}, breaker ${node.breaker.state}`],
    ["Lease", node.answered_s_ago === null ? "never answered" : `answered ${duration(node.answered_s_ago)} ago`],
    ["Address", node.control_address],
  ];
  if (own) {
    rows.push(["Process", `${own.pid}, up ${duration(own.up_s)}`], ["Kernels", own.kernels],
      ["Leases held", own.leases.map((lease) => lease.id ?? lease.name ?? Object.values(lease)[0]).join(", ") || "none"], ["Redis", own.redis], ["Engine", own.engine]);
  }
  facts.replaceChildren(...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  attempts.replaceChildren(...(own?.attempts?.length ? [table(own.attempts)] : []));
  text(problem, own || !token() ? "" : node.own_missing);
  const draining = load.draining;
  drain.disabled = draining;
  undrain.disabled = !draining;
  unlock.hidden = Boolean(own);
}

function table(list) {
  const columns = Object.keys(list[0]);
  return h("div", { class: "scroll" }, h("table", { "aria-label": "Attempts" },
    h("thead", {}, h("tr", {}, columns.map((name) => h("th", {}, name.replaceAll("_", " "))))),
    h("tbody", {}, list.slice(0, 20).map((row) => h("tr", {}, columns.map((name) => h("td", {}, format(row[name]))))))));
}

const format = (value) => (value === null || value === undefined ? "–" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(2) : String(value));

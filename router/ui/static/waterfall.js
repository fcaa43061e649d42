// The waterfall of one request, drawn from its story.

import { h, keyed, s, text } from "./dom.js";
import { bytes, count, counted, duration } from "./units.js";

const ROW = 22;
const LEFT = 168;

/**
 * The rows of a story: {key, name, kind, from, to, note, ticks}, times in seconds after the arrival.
 *
 * A node's marks count from the attempt's arrival there. They are placed at the time at which its request was sent, so that the
 * clocks of hosts need not agree.
 */
export function rowsOf(story) {
  const end = story.duration_s;
  const rows = [];
  const add = (name, kind, from, to, note = "", ticks = []) =>
    rows.push({ key: `${rows.length} ${name}`, name, kind, from: Math.max(0, from), to: Math.max(from, Math.min(to, end)), note, ticks });
  const attempts = split(story.events);
  for (const { event, from, to } of waits(story.events, end)) add(event, "wait", from, to);
  for (const attempt of attempts) addAttempt(attempt, attempts, story, end, add);
  return rows;
}

const WAITS = { queued: "admission queue", waiting_for_node: "waiting for a node", backoff: "back-off" };

function waits(events, end) {
  return events.flatMap((event, at) => (event.event in WAITS ? [{ event: WAITS[event.event], from: event.t_s, to: events[at + 1]?.t_s ?? end }] : []));
}

/** The events of each attempt. */
function split(events) {
  const attempts = [];
  for (const event of events) {
    if (event.event === "decision") attempts.push({ number: attempts.length + 1, start: event.t_s, decision: event.data, events: [], fault: null });
    const attempt = attempts.at(-1);
    if (!attempt) continue;
    attempt.events.push(event);
    if (["leg_failed", "node_lost", "gap"].includes(event.event)) attempt.fault = event;
  }
  return attempts;
}

function addAttempt(attempt, attempts, story, end, add) {
  const next = attempts[attempt.number];
  const find = (...names) => attempt.events.find((event) => names.includes(event.event));
  const over = attempt.fault?.t_s ?? next?.start ?? end;
  const name = attempts.length > 1 ? `${attempt.number}: ` : "";
  if (attempts.length > 1) add(`attempt ${attempt.number}`, attempt.fault ? "fault" : "attempt", attempt.start, over, attempt.fault?.reason ?? "");
  const marks = (role) => {
    const timeline = attempt.events.find((event) => event.event === "timeline" && event.data.role === role && event.data.attempt === attempt.number);
    const sent = attempt.events.find((event) => event.event === "sent" && event.reason === (role === "prefill" ? "PrefillRequest" : "DecodeRequest"));
    return timeline && sent ? timeline.data.marks.map(([mark, at, number]) => ({ mark, t: sent.t_s + at, number })) : [];
  };
  const of = (list, mark) => list.filter((each) => each.mark === mark);
  const [prefill, decode] = [marks("prefill"), marks("decode")];
  const first = find("first_token", "resumed");
  const computing = of(prefill, "offer")[0]?.t;
  const sent = find("sent")?.t_s ?? attempt.start;
  const chunks = of(prefill.length ? prefill : decode, "chunk");
  if (computing !== undefined) add(`${name}prefill queue`, "wait", sent, computing);
  let from = computing ?? sent;
  for (const [at, chunk] of chunks.entries()) {
    const before = at ? chunks[at - 1].number : 0;
    add(`${name}prefill chunk ${at + 1}`, "prefill", from, chunk.t, counted(Math.max(0, chunk.number - before), "token"));
    from = chunk.t;
  }
  if (!chunks.length && first) add(`${name}prefill`, "prefill", from, first.t_s);
  const [offer, grant] = [of(decode, "offer")[0] ?? of(prefill, "offer")[0], of(decode, "grant")[0] ?? of(prefill, "grant")[0]];
  if (offer && grant) add(`${name}offer to grant`, "offer", offer.t, grant.t);
  addSlices(name, decode, grant, attempt, story, add);
  if (first) add(`${name}${first.event === "resumed" ? "resumed" : "first token"}`, "mark", first.t_s, first.t_s, `${first.data?.node ?? ""} at ${duration(first.t_s)}`);
  const steps = (story.token_times ?? []).filter((t) => t >= (first?.t_s ?? Infinity) - 1e-4 && t <= over + 1e-4);
  if (first) add(`${name}decode`, "decode", find("handover")?.t_s ?? first.t_s, over, steps.length > 1 ? `${count(steps.length)} steps, ${duration((steps.at(-1) - steps[0]) / (steps.length - 1))} each` : "", steps);
}

function addSlices(name, decode, grant, attempt, story, add) {
  const layers = decode.filter((each) => each.mark === "layer");
  if (!layers.length || !grant) return;
  // Layers that arrived in one message share a row; so do neighbours if there are many.
  const most = Math.max(1, Math.ceil(layers.length / 24));
  const groups = [];
  for (const layer of layers) {
    const last = groups.at(-1);
    if (last && (last.t === layer.t || last.layers.length < most)) {
      last.layers.push(layer.number);
      last.t = Math.max(last.t, layer.t);
    } else groups.push({ layers: [layer.number], t: layer.t });
  }
  let from = grant.t;
  for (const group of groups) {
    const [lo, hi] = [Math.min(...group.layers), Math.max(...group.layers)];
    add(`${name}KV of layer${lo === hi ? ` ${lo}` : `s ${lo}–${hi}`}`, "relay", from, group.t, `at ${duration(group.t)}`);
    from = group.t;
  }
  const received = decode.find((each) => each.mark === "received");
  if (received) add(`${name}KV complete`, "mark", received.t, received.t, story.usage ? bytes(story.usage.relayed_bytes) : "");
}

/** One story: a summary, the waterfall, its events as a table. */
export class Waterfall {
  constructor() {
    this.summary = h("dl", { class: "figures" });
    this.notice = h("p", { class: "dim", hidden: true }, "What the nodes did inside is recorded only while a page of the dashboard is open.");
    this.svg = s("svg", { class: "waterfall", role: "img", "aria-label": "Waterfall of the request; the table of events below says the same" });
    this.events = h("tbody");
    this.element = h("section", {}, this.summary, this.notice, h("div", { class: "panel scroll" }, this.svg),
      h("h2", {}, "Events"), h("div", { class: "scroll" }, h("table", { "aria-label": "Events" },
        h("thead", {}, h("tr", {}, h("th", { class: "num" }, "After"), h("th", {}, "Event"), h("th", {}, "Node"), h("th", {}, "Reason"))), this.events)));
    this.story = null;
    addEventListener("resize", () => this.story && this.draw());
  }

  show(story) {
    this.story = story;
    this.notice.hidden = story.events.some((event) => event.event === "timeline");
    const first = story.events.find((event) => event.event === "first_token");
    const figures = [["Outcome", story.outcome], ["Took", duration(story.duration_s)], ["First token", duration(first?.t_s)],
      ["Attempts", story.attempts], ["Relayed", story.usage ? bytes(story.usage.relayed_bytes) : "–"]];
    keyed(this.summary, figures, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" })),
      (element, [, value]) => text(element.children[1], value));
    keyed(this.events, story.events.map((event, at) => ({ ...event, at })), (event) => event.at,
      (event) => h("tr", {}, h("td", { class: "num" }, duration(event.t_s)), h("td", {}, event.event.replaceAll("_", " ")),
        h("td", {}, event.data?.node_id ?? (typeof event.data?.node === "string" ? event.data.node : "")), h("td", { class: "wrap" }, event.reason)), () => {});
    this.draw();
  }

  draw() {
    const rows = rowsOf(this.story);
    const width = Math.max(560, this.svg.parentElement.clientWidth - 30);
    const end = Math.max(1e-6, this.story.duration_s, ...rows.map((row) => row.to));
    const scale = (width - LEFT - 8) / end;
    const x = (t) => LEFT + t * scale;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", rows.length * ROW + 24);
    const lines = [0, 0.25, 0.5, 0.75, 1].map((part) => part * end);
    const group = this.svg.grid ??= this.svg.appendChild(s("g", { class: "grid" }));
    group.replaceChildren(...lines.map((t, at) => s("g", {}, s("line", { x1: x(t), x2: x(t), y1: 18, y2: rows.length * ROW + 22 }),
      s("text", { x: x(t), y: 12, "text-anchor": at === 4 ? "end" : at ? "middle" : "start" }, t ? duration(t) : "0"))));
    const body = this.svg.body ??= this.svg.appendChild(s("g"));
    keyed(body, rows, (row) => row.key, (row) => s("g", { class: `row ${row.kind}` }, s("text", { class: "name" }), s("rect", { rx: 1.5 }), s("path"), s("text", { class: "note" })),
      (element, row) => {
        const top = rows.indexOf(row) * ROW + 22;
        const [name, bar, ticks, note] = element.children;
        const [from, to] = [x(row.from), x(row.to)];
        text(name, row.name);
        name.setAttribute("x", 0);
        name.setAttribute("y", top + 14);
        bar.setAttribute("x", row.kind === "mark" ? from - 1 : from);
        bar.setAttribute("y", top + 4);
        bar.setAttribute("width", row.kind === "mark" ? 2 : Math.max(1.5, to - from));
        bar.setAttribute("height", ROW - 10);
        ticks.setAttribute("d", row.ticks.map((t) => `M${x(t).toFixed(1)} ${top + 4}v${ROW - 10}`).join(""));
        const shown = row.note || (row.kind === "mark" ? "" : duration(row.to - row.from));
        text(note, shown.length > 60 ? `${shown.slice(0, 57)}…` : shown);
        const room = width - to > 8 + 6.4 * Math.min(60, shown.length);
        note.setAttribute("x", room ? to + 6 : from - 6);
        note.setAttribute("text-anchor", room ? "start" : from - LEFT > 6.4 * shown.length ? "end" : "start");
        if (!room && from - LEFT <= 6.4 * shown.length) note.setAttribute("x", from + 6);
        note.classList.toggle("inside", !room && from - LEFT <= 6.4 * shown.length);
        note.setAttribute("y", top + 14);
      });
  }
}

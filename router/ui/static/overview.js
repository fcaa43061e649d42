// The operator's view, above the topology: what the cluster did in the last minute, what is wrong, what has changed.

import { get } from "./api.js";
import { h, keyed, text } from "./dom.js";
import { fell, ms, part, quantile, rate, share } from "./figures.js";
import { moment } from "./units.js";

const WINDOW_S = 60;
const LAST = 8; // points of ten seconds
const HISTORY_MS = 5_000;
const FINDINGS_MS = 15_000;
const MOST = 12;

/** The section, and `show(state)` for each snapshot. */
export function overview() {
  const figures = h("dl", { class: "figures", "aria-label": "The last minute" });
  const problems = h("ul", { class: "findings", "aria-label": "Findings" });
  const changes = h("ol", { class: "changes", "aria-label": "Changes" });
  const element = h("section", { class: "overview" }, figures,
    h("div", { class: "columns" },
      h("section", { class: "panel" }, h("h2", {}, "What is wrong"), problems),
      h("section", { class: "panel" }, h("h2", {}, "What has changed"), changes)));
  let points = [];

  async function every(intervalMs, ask) {
    try {
      if (!document.hidden) await ask();
    } catch {
      // The page's status says what is wrong.
    }
    setTimeout(every, intervalMs, intervalMs, ask);
  }
  every(HISTORY_MS, async () => {
    const found = await get(`history?limit=${LAST}`);
    points = found.points;
    list(changes, found.changes.slice(0, MOST), "Nothing has changed since the router's start, within the last hour.",
      ({ time, what }) => [h("time", { class: "dim num", datetime: new Date(1000 * time).toISOString() }, moment(time)), " ", what]);
  });
  every(FINDINGS_MS, async () => {
    const { findings, missing } = await get("findings");
    const none = findings ? "Nothing was found." : missing;
    list(problems, findings ?? [], none, ({ where, what, remedy }) => [h("strong", {}, `${where}: `), what, h("p", { class: "dim" }, remedy)]);
  });

  function show(state) {
    const time = Date.now() / 1000;
    const earlier = points.findLast((point) => point.time <= time - WINDOW_S) ?? points[0];
    const now = state.totals;
    const known = earlier && !fell(now, { ...earlier.totals, ttft: now.ttft, itl: now.itl });
    const before = known ? earlier.totals : now;
    const seconds = known ? Math.max(1, time - earlier.time) : 1;
    const failed = now.failed - before.failed;
    const asked = failed + now.answered - before.answered;
    const hits = part(now.prefix_hits - before.prefix_hits, now.prefix_queries - before.prefix_queries);
    const [median, high] = [0.5, 0.95].map((q) => quantile(now.ttft, before.ttft, q));
    const rows = [
      ["Requests", rate((now.answered - before.answered) / seconds), `${state.running} running, ${state.waiting} without a token yet`],
      ["Tokens", rate((now.generated_tokens - before.generated_tokens) / seconds), `${rate((now.prompt_tokens - before.prompt_tokens) / seconds)} of prompts`],
      ["First token", ms(median), `95 %: ${ms(high)}`],
      ["Prefix hits", share(hits), "of prompt tokens"],
      ["Errors", String(failed), asked ? `${share(part(failed, asked))} of the requests` : "no request ended"],
    ];
    keyed(figures, rows, ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }), h("dd", { class: "dim" })),
      (row, [name, value, note]) => {
        text(row.children[1], value);
        text(row.children[2], note);
        row.children[1].classList.toggle("bad", name === "Errors" && failed > 0);
      });
  }

  return { element, show };
}

/** Show items, or why there are none. */
function list(parent, items, none, content) {
  const shown = items.length ? items : [null];
  keyed(parent, shown, (item) => JSON.stringify(item), (item) => (item ? h("li", {}, content(item)) : h("li", { class: "dim" }, none)), () => {});
}

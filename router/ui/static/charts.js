// Charts of the last hour, from the differences of the router's counters, which the router keeps every ten seconds.

import { get } from "./api.js";
import { h } from "./dom.js";
import { fell, ms, part, quantile, rate, share, within } from "./figures.js";
import { frame, poll } from "./frame.js";
import { bytes } from "./units.js";

const KEPT = 960;
const WINDOW = 10;
const SHORTEST_S = 60;
const HEIGHT = 180;

frame("charts");
const main = document.getElementById("main");
const grid = h("div", { class: "charts" });
main.append(h("p", { class: "dim" }, "Each point is the mean or percentile of the 10 s before it."), grid);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** title, series as [label, colour], format, (later, earlier, seconds, state) -> values */
const CHARTS = [
  ["Time to first token", [["median", "--prefill"], ["95 %", "--decode"]], ms, (b, a) => [quantile(b.ttft, a.ttft, 0.5), quantile(b.ttft, a.ttft, 0.95)]],
  ["Time between tokens", [["median", "--prefill"], ["95 %", "--decode"]], ms, (b, a) => [quantile(b.itl, a.itl, 0.5), quantile(b.itl, a.itl, 0.95)]],
  ["Prompt tokens found in prefix caches", [["hits", "--prefill"]], share, (b, a) => [part(b.prefix_hits - a.prefix_hits, b.prefix_queries - a.prefix_queries)]],
  ["Attempts: relayed and local", [["relayed", "--prefill"], ["local", "--decode"]], rate,
    (b, a, seconds) => [(b.attempts.relayed - a.attempts.relayed) / seconds, (b.attempts.local - a.attempts.local) / seconds]],
  ["Requests within the objectives", [["first token", "--prefill"], ["between tokens", "--decode"]], share,
    (b, a, _, state) => [within(b.ttft, a.ttft, state.objectives.ttft_s), within(b.itl, a.itl, state.objectives.tpot_s)]],
  ["Tokens", [["prompt", "--prefill"], ["generated", "--decode"]], rate,
    (b, a, seconds) => [(b.prompt_tokens - a.prompt_tokens) / seconds, (b.generated_tokens - a.generated_tokens) / seconds]],
  ["Answers and failures", [["answered", "--good"], ["failed", "--bad"]], rate,
    (b, a, seconds) => [(b.answered - a.answered) / seconds, (b.failed - a.failed) / seconds]],
  ["KV relayed", [["bytes", "--prefill"]], (v) => (v === null ? "–" : `${bytes(v)}/s`), (b, a, seconds) => [(b.relayed_bytes - a.relayed_bytes) / seconds]],
];

const now_s = () => Date.now() / 1000;
const clock = (time, seconds) => new Date(1000 * time).toLocaleTimeString(undefined, { timeStyle: seconds ? "medium" : "short" });
const count = (column) => column.reduce((sum, value) => sum + (value !== null), 0);
const samples = [];
const shown = CHARTS.map(([title, series, format]) => {
  const place = h("div", { class: "plot" });
  const now = h("span", { class: "dim num" });
  const panel = h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), now, place);
  grid.append(panel);
  const axis = () => ({ stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" });
  const options = () => ({
    width: Math.max(200, place.clientWidth), height: HEIGHT, legend: { show: false }, cursor: { y: false },
    scales: {
      // One point, or a few, do not fill the width: the axis covers a minute at least.
      x: { range: (_, min, max) => [Math.min(min ?? now_s(), (max ?? now_s()) - SHORTEST_S), max ?? now_s()] },
      y: { range: (_, __, max) => [0, max > 0 ? 1.1 * max : 1] },
    },
    axes: [{ ...axis(), values: (_, ticks) => ticks.map((tick) => clock(tick, ticks[1] - ticks[0] < 60)) }, { ...axis(), size: 62, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...series.map(([label, name], at) => ({ label, stroke: colour(name), width: 1.5, dash: at ? [5, 3] : undefined, points: { show: (plot, line) => count(plot.data[line]) < 3, size: 5 } }))],
  });
  const data = [[], ...series.map(() => [])];
  let plot = new uPlot(options(), data, place);
  const rebuild = () => {
    plot.destroy();
    plot = new uPlot(options(), data, place);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
  addEventListener("resize", () => plot.setSize({ width: Math.max(200, place.clientWidth), height: HEIGHT }));
  return { data, format, now, series, update: () => plot.setData(data) };
});

function show(state) {
  add(Date.now() / 1000, state);
  for (const chart of shown) chart.update();
}

/** One more point of every chart. */
function add(time, state) {
  if (samples.length && fell(state.totals, samples.at(-1).totals)) samples.length = 0;
  samples.push({ time, totals: state.totals });
  while (samples.length > 1 && samples[1].time <= time - WINDOW) samples.shift();
  const earlier = samples[0];
  const seconds = time - earlier.time;
  if (seconds <= 0) return;
  CHARTS.forEach(([, series, format, values], at) => {
    const chart = shown[at];
    const found = values(state.totals, earlier.totals, seconds, state);
    chart.data[0].push(time);
    found.forEach((value, line) => chart.data[line + 1].push(value));
    if (chart.data[0].length > KEPT) chart.data.forEach((column) => column.shift());
    const missing = series[0][0] === "first token" && !state.objectives.ttft_s && !state.objectives.tpot_s;
    chart.now.replaceChildren(...(missing ? ["No objectives are set: --slo-ttft, --slo-tpot."] : series.flatMap(([label, name], line) =>
      [h("i", { class: `key ${name.slice(2)}` }), `${label} ${format(found[line])}  `])));
  });
}

/** What the router kept before this page was opened. */
async function before() {
  const { points } = await get("history").catch(() => ({ points: [] }));
  const { objectives } = await get("snapshot").catch(() => ({ objectives: {} }));
  for (const { time, totals } of points) add(time, { totals, objectives });
  for (const chart of shown) chart.update();
}

let last = null;
await before();
poll(() => "snapshot", (state) => (last = state), 1000, () => (last = null));
setInterval(() => last && !document.hidden && show(last), 1000);
